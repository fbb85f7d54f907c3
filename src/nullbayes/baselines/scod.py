r"""SCOD, sketching curvature for out-of-distribution detection (Sharma, Azizan and Pavone 2021).

The Fisher information of the training data, :math:`A^\top A`, is known by a random sketch taken in one pass. The score
of an input is :math:`\operatorname{tr}\big(F(x)\,(A^\top A + \alpha I)^{-1}\big)`, with
:math:`F(x) = J(x)^\top H(x) J(x)` the Fisher information of the input itself: the expected change of its predictive
distribution, a KL divergence to second order and up to a factor. They keep two sketches; here it is one (Nyström), for
the same vectors at least as accurate on a positive semi-definite matrix (Tropp et al. 2017).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.base import Work
from nullbayes.baselines.lanczos import LowRankLaplace
from nullbayes.baselines.score import Scored
from nullbayes.errors import SettingsError
from nullbayes.linalg.curvature import Curvature, nystrom_pairs
from nullbayes.predictive import SCORES, Mask


class SCOD(Scored, LowRankLaplace):
    """A sketch of the Fisher information, and its own score; predictions are those of its low-rank Laplace samples.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn, memory_budget
        See :class:`Budgeted <nullbayes.baselines.budget.Budgeted>`.
    """

    _score = "scod"

    def _approximate(self, work: Work) -> Curvature:
        return nystrom_pairs(work.rows, self._rank(work), torch.Generator().manual_seed(self._seed))

    def _score_rows(self, rows: Tensor, x: Any) -> Tensor:
        scaled = self._hessian_roots(self._network.outputs(x)) @ rows
        variances = self.curvature.variance(scaled.flatten(0, 1), self.prior_precision)
        return variances.view(scaled.shape[:2]).sum(1)

    def _hessian_roots(self, outputs: Tensor) -> Tensor:  # (n, ...) -> (n, O, O)
        """Return the roots of the likelihood's Hessian, column by column; it does not depend on targets."""
        units = torch.eye(outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
        columns = [
            self._likelihood.scaled(unit.view(outputs.shape[1:]).expand_as(outputs), outputs, outputs).flatten(1)
            for unit in units
        ]
        return torch.stack(columns, dim=2)

    def ood_score(
        self,
        x: Any,
        kind: str = "scod",
        *,
        per: str = "input",
        mask: Mask = None,
        pred_type: str = "linearized",
    ) -> Tensor:  # (N,) or (N, ...)
        """Return one number an input: higher is stranger.

        ``kind`` is "scod", in closed form, or one of those that all samples have ("max_variance", ...).
        """
        if kind == self._score:
            return self._own_score(x, per, mask)
        if kind not in SCORES:
            msg = f"kind must be one of {', '.join((self._score, *SCORES))}, not {kind!r}."
            raise SettingsError(msg)
        return super().ood_score(x, kind, per=per, mask=mask, pred_type=pred_type)
