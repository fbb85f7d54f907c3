r"""Sketched Lanczos uncertainty (Miani, Roy and Hauberg 2024).

Lanczos' process on :math:`A^\top A` with two vectors in memory; each is sketched as it comes, :math:`S v_i`, and the
sketches are made orthonormal, which repairs what the process has lost of its orthogonality. The score of an input is
:math:`\|J(x)\|^2 - \|U_S^\top S J(x)^\top\|^2`: an estimate of the squared length of its gradients outside the
eigenvectors of largest curvature, with far more of those than would fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Work
from nullbayes.baselines.budget import Budgeted
from nullbayes.baselines.score import ScoreOnly
from nullbayes.errors import SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.linalg.lanczos import lanczos_process
from nullbayes.linalg.sketch import Sketch, padded_size
from nullbayes.precision import full_precision

_PROPORTION = 10 / 3  # of rank to budget, and of parameters to sketch: the paper's 1,000 vectors of 0.3 P within 300 P


class SketchedLanczos(ScoreOnly, Budgeted):
    """The score of local ensembles with more, shorter vectors for the same memory.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn, memory_budget
        See :class:`Budgeted <nullbayes.baselines.budget.Budgeted>`; rank times sketch size stays within the budget.
    rank : int, optional
        Lanczos vectors; by default ten thirds of the budget.
    sketch_size : int, optional
        Numbers that stand for each; by default what the rank leaves of the budget.
    """

    _score = "sketched_lanczos"
    _sketch: Sketch
    _basis: Tensor  # (k, s)

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        prior_precision: float = 1.0,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
        memory_budget: int = 300,
        rank: int | None = None,
        sketch_size: int | None = None,
    ) -> None:
        super().__init__(
            model, likelihood, parameters=parameters, prior_precision=prior_precision, batch_fn=batch_fn,
            output_fn=output_fn, memory_budget=memory_budget,
        )  # fmt: skip
        for name, value in (("rank", rank), ("sketch_size", sketch_size)):
            if value is not None and value < 1:
                msg = f"{name} must be at least 1, not {value}."
                raise SettingsError(msg)
        self._asked_rank, self._asked_size = rank, sketch_size

    def _sizes(self, work: Work) -> tuple[int, int]:
        """Return rank and sketch size."""
        p = work.rows.n_columns
        usual = min(round(_PROPORTION * self._budget), math.isqrt(self._budget * p))  # no more than the sketch is long
        rank = min(self._asked_rank or usual, work.rows.n_rows, p)
        size = self._asked_size or min(padded_size(p), self._budget * p // rank)
        if rank > size:
            msg = f"A sketch of {size:,} numbers cannot tell {rank:,} vectors apart: use a smaller rank."
            raise SettingsError(msg)
        if rank * size > self._budget * p:
            msg = (
                f"{rank:,} vectors of {size:,} numbers exceed memory_budget={self._budget} times {p:,} parameters: "
                "use a smaller rank or sketch_size, or a larger memory_budget."
            )
            raise SettingsError(msg)
        self._check_memory(2 * rank * size + 6 * padded_size(p), work)
        return rank, size

    @full_precision()
    def _learn(self, work: Work) -> tuple[int | None, str]:
        rank, size = self._sizes(work)
        self._sketch = Sketch(work.rows.n_columns, size, self._seed, work.rows.device)
        sketched = self._network.theta.new_empty(rank, size)

        def keep(k: int, vector: Tensor) -> None:
            sketched[k] = self._sketch(vector[None])[0]

        with work.meter.phase("factors"):
            generator = torch.Generator().manual_seed(self._seed)
            combinations = lanczos_process(work.held(work.available // 4), rank, generator, keep).in_row_space()
            found = len(combinations)
            self._basis = _orthonormal(combinations.T.to(sketched) @ sketched[:found])
        self._no_samples()
        return len(self._basis), f"{found:,} Lanczos vectors, sketched to {size:,} numbers"

    def _score_rows(self, rows: Tensor, x: Any) -> Tensor:
        flat = rows.flatten(0, 1)
        seen = self._sketch(flat) @ self._basis.T
        squares = flat.square().sum(1) - seen.square().sum(1)
        return squares.view(rows.shape[:2]).sum(1)

    def _tensors(self) -> dict[str, Tensor]:
        return {"sketched": self._basis}

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        self._basis = tensors["sketched"]
        self._sketch = Sketch(self._network.n_parameters, self._basis.shape[1], self._seed, self._basis.device)


def _orthonormal(vectors: Tensor) -> Tensor:  # (k, s) -> (r, s)
    """Return an orthonormal basis of the span, without what rounding alone keeps apart."""
    if len(vectors) == 0:
        return vectors
    _, lengths, basis = torch.linalg.svd(vectors, full_matrices=False)
    orthonormal: Tensor = basis[lengths > torch.finfo(vectors.dtype).eps ** 0.25 * lengths[0]]
    return orthonormal
