r"""Linearized Laplace: :math:`\mathcal N(\theta, (A^\top A + \alpha I)^{-1})`, with all correlations.

:math:`A^\top A` is the generalized Gauss-Newton matrix of the training data.
"""

from __future__ import annotations

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.laplace import Laplace
from nullbayes.baselines.method import Context
from nullbayes.errors import SettingsError
from nullbayes.linalg.curvature import Curvature, Dual, MatrixFree, Primal
from nullbayes.linalg.normal import normal_bytes, normal_matrix

_FACTORED = {"cpu": 8_000, "cuda": 60_000}  # columns or rows whose matrix is factored within minutes
_SMALL = 2048  # columns whose matrix is taken even where rows are fewer: it needs no rows later, and fits in a file
_PRECONDITIONED = 200  # eigenpairs
_REASONS = {
    Primal: "all parameters, factored",
    Dual: "all rows, factored",
    MatrixFree: "conjugate gradients",
}


class FullCovariance(Laplace):
    """The whole Gauss-Newton matrix, in the first form that fits in memory."""

    form = Primal

    def approximate(self, context: Context) -> Curvature:
        """Factor a matrix of columns or of rows, or prepare for conjugate gradients."""
        rows, most = context.rows, _FACTORED.get(context.rows.device.type, 8_000)
        side = rows.n_columns if rows.n_columns <= _SMALL else min(rows.n_rows, rows.n_columns)
        factored = side <= most and 16 * side**2 + normal_bytes(side, rows.device) <= context.available // 2
        if factored and rows.n_columns == side:
            return Primal(normal_matrix(rows))
        if factored:
            return Dual(context.held(context.available // 4))
        vectors = 4 * (context.n_samples + _PRECONDITIONED) * rows.n_columns * rows.dtype.itemsize
        if vectors > context.available:
            msg = (
                f"Samples of {rows.n_columns:,} parameters with a preconditioner take {vectors / 2**20:,.0f} MiB, more "
                f"than the memory limit of {context.available / 2**20:,.0f} MiB: raise memory_limit, or use "
                "nb.baselines.LastLayerLaplace or DiagonalLaplace."
            )
            raise SettingsError(msg)
        return MatrixFree(context.held(context.available - vectors), _PRECONDITIONED, context.generator())

    def describe(self, curvature: Curvature) -> str:
        """Return which form was taken."""
        return _REASONS[type(curvature)]


class LinearizedLaplace(Baseline):
    """Full-covariance Laplace (Immer et al. 2021), exact where a matrix of rows or of columns fits in memory.

    Where neither fits, conjugate gradients compute the samples.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    """

    _method = FullCovariance()
