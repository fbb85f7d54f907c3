r"""Diagonal Laplace: :math:`\mathcal N(\theta, (\operatorname{diag}(A^\top A) + \alpha I)^{-1})`."""

from __future__ import annotations

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.laplace import Laplace
from nullbayes.baselines.method import Context
from nullbayes.linalg.curvature import Curvature, Diagonal, column_squares


class _Diagonal(Laplace):
    form = Diagonal

    def approximate(self, context: Context) -> Curvature:
        return Diagonal(column_squares(context.rows))


class DiagonalLaplace(Baseline):
    """Laplace approximation in which parameters vary independently: one pass over the data, one number per parameter.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    """

    _method = _Diagonal()
