r"""SCOD, sketching curvature for out-of-distribution detection (Sharma, Azizan and Pavone 2021).

The Fisher information of the training data, :math:`A^\top A`, is approximated by a random sketch taken in one pass. The
score of an input is :math:`\operatorname{tr}\big(F(x)\,(A^\top A + \alpha I)^{-1}\big)`, where
:math:`F(x) = J(x)^\top H(x) J(x)` is the Fisher information of the input itself: the expected change of its predictive
distribution, a KL divergence to second order and up to a factor. The authors keep two sketches. Here it is one
(Nyström), which for the same number of vectors is at least as accurate on a positive semi-definite matrix (Tropp et al.
2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.laplace import Laplace
from nullbayes.baselines.method import FitContext, LikelihoodLike, Options, Question, check_counts
from nullbayes.likelihoods import Likelihood
from nullbayes.linalg.curvature import Curvature, LowRank, nystrom_pairs


@dataclass(frozen=True)
class _Sketch(Laplace):
    memory_budget: int = 300

    form = LowRank
    own_score = "scod"

    def __post_init__(self) -> None:
        check_counts(vars(self))

    def approximate(self, context: FitContext) -> Curvature:
        size = context.vectors(self.memory_budget)
        return nystrom_pairs(context.once(size), size, context.generator())

    def score_rows(self, state: Curvature, rows: Tensor, question: Question) -> Tensor:
        scaled = _hessian_roots(question.likelihood, question.network.outputs(question.x)) @ rows
        variances = state.variance(scaled.flatten(0, 1), question.alpha)
        return variances.view(scaled.shape[:2]).sum(1)


def _hessian_roots(likelihood: Likelihood, outputs: Tensor) -> Tensor:  # (n, ...) -> (n, O, O)
    """Return roots of the likelihood's Hessian, all columns at once; they do not depend on targets."""
    n, size = len(outputs), outputs[0].numel()
    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device).repeat(n, 1)
    repeated = outputs.repeat_interleave(size, 0)
    columns = likelihood.scaled(units.view_as(repeated), repeated, repeated)
    return columns.reshape(n, size, size).mT


class SCOD(Baseline):
    """A sketch of the Fisher information with the score "scod"; predictions come from low-rank Laplace samples.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    memory_budget : int
        How many vectors of the size of the parameters the sketch has, and the memory holds.
    parameters, prior_precision, batch_fn, output_fn : optional
        As for :class:`DiagonalLaplace <nullbayes.baselines.DiagonalLaplace>`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> noise = nb.likelihoods.Regression(sigma_noise=1.0)
    >>> posterior = nb.baselines.SCOD(model, noise, memory_budget=10).fit(x[:1], torch.zeros(1, 1))
    >>> posterior.ood_score(x)
    tensor([0.6667, 2.0000])
    """

    _method = _Sketch()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        memory_budget: int = 300,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Sketch(int(memory_budget))
