r"""Lanczos Laplace: linearized Laplace on the largest eigenpairs of :math:`A^\top A`, the paper's LLA."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nullbayes.baselines.base import Work
from nullbayes.baselines.budget import Budgeted
from nullbayes.baselines.laplace import Laplace
from nullbayes.linalg.curvature import Curvature, LowRank, lanczos_pairs


class LowRankLaplace(Budgeted, Laplace):
    """A curvature of a few eigenpairs; abstract: a subclass says how they are found."""

    def _rebuilt(self, tensors: Mapping[str, Tensor]) -> Curvature:
        return LowRank(tensors["basis"], tensors["values"])


class LanczosLaplace(LowRankLaplace):
    """Linearized Laplace with the eigenpairs that Lanczos' process finds, within a budget.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn, memory_budget
        See :class:`Budgeted <nullbayes.baselines.budget.Budgeted>`.
    """

    def _approximate(self, work: Work) -> Curvature:
        rank, generator = self._rank(work), torch.Generator().manual_seed(self._seed)
        return lanczos_pairs(work.held(work.available // 4), rank, generator)
