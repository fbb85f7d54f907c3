r"""Diagonal Laplace: :math:`\mathcal N(\theta, (\operatorname{diag}(A^\top A) + \alpha I)^{-1})`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nullbayes.baselines.base import Work
from nullbayes.baselines.laplace import Laplace
from nullbayes.linalg.curvature import Curvature, Diagonal, column_squares


class DiagonalLaplace(Laplace):
    """Parameters vary one by one: the cheapest curvature, one pass over the data and one number a parameter.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    """

    def _approximate(self, work: Work) -> Curvature:
        return Diagonal(column_squares(work.rows))

    def _rebuilt(self, tensors: Mapping[str, Tensor]) -> Curvature:
        return Diagonal(tensors["diagonal"])
