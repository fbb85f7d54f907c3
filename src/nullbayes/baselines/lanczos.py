r"""Lanczos Laplace: linearized Laplace on the largest eigenpairs of :math:`A^\top A`, the paper's LLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from nullbayes.baselines.base import Baseline, LikelihoodLike, Options
from nullbayes.baselines.laplace import Laplace
from nullbayes.baselines.method import Context, check_budget
from nullbayes.linalg.curvature import Curvature, LowRank, lanczos_pairs


@dataclass(frozen=True)
class _Lanczos(Laplace):
    memory_budget: int = 300

    form = LowRank

    def __post_init__(self) -> None:
        check_budget(self.memory_budget)

    def approximate(self, context: Context) -> Curvature:
        rank = context.vectors(self.memory_budget)
        return lanczos_pairs(context.held(context.available // 4), rank, context.generator())


class LanczosLaplace(Baseline):
    """Linearized Laplace with the eigenpairs that the Lanczos process finds within a budget.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    memory_budget : int
        How many numbers may be held, as a multiple of the number of parameters. The paper takes 300 for all methods
        with such a budget.
    """

    _method = _Lanczos()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        memory_budget: int = 300,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Lanczos(int(memory_budget))
