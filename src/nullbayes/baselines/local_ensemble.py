r"""Local ensembles (Madras, Atwood and D'Amour 2020).

The score of an input is the length of the part of its prediction gradients that lies where the loss is flat: outside
the eigenvectors of largest curvature, which Lanczos' process finds. They take the Hessian of the loss; here it is the
Gauss-Newton matrix, which is positive semi-definite, whose kernel is the one that keeps predictions (the paper's
Section 2), and which differs little where the network fits its data. With several outputs the squared lengths add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.base import Work
from nullbayes.baselines.budget import Budgeted
from nullbayes.baselines.score import ScoreOnly
from nullbayes.linalg.curvature import LowRank, lanczos_pairs
from nullbayes.precision import full_precision


class LocalEnsemble(ScoreOnly, Budgeted):
    """How much of an input's gradients no direction of large curvature explains.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn, memory_budget
        See :class:`Budgeted <nullbayes.baselines.budget.Budgeted>`; each vector of the budget is an eigenvector.
    """

    _score = "local_ensemble"
    _pairs: LowRank

    @full_precision()
    def _learn(self, work: Work) -> tuple[int | None, str]:
        with work.meter.phase("factors"):
            generator = torch.Generator().manual_seed(self._seed)
            self._pairs = lanczos_pairs(work.held(work.available // 4), self._rank(work), generator)
        self._no_samples()
        return self._pairs.rank, "outside the leading eigenvectors"

    def _score_rows(self, rows: Tensor, x: Any) -> Tensor:
        return self._pairs.outside(rows.flatten(0, 1)).view(rows.shape[:2]).sum(1).sqrt()

    def _tensors(self) -> dict[str, Tensor]:
        return self._pairs.tensors()

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        self._pairs = LowRank(tensors["basis"], tensors["values"])
        if self._pairs.n_columns != self._network.n_parameters:
            msg = f"vectors of {self._pairs.n_columns} numbers"
            raise ValueError(msg)
