r"""Linearized Laplace: :math:`\mathcal N(\theta, (A^\top A + \alpha I)^{-1})`, with all correlations.

:math:`A^\top A` is the generalized Gauss-Newton matrix of the training data.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nullbayes.baselines.base import Work
from nullbayes.baselines.laplace import Laplace
from nullbayes.errors import SettingsError
from nullbayes.limits import normal_bytes
from nullbayes.linalg.curvature import Curvature, Dual, MatrixFree, Primal
from nullbayes.linalg.normal import normal_matrix

_FACTORED = {"cpu": 8_000, "cuda": 60_000}  # columns or rows whose matrix is factored within minutes
_SMALL = 2048  # columns whose matrix is taken even where rows are fewer: it needs no rows later, and fits in a file
_PRECONDITIONED = 200  # eigenpairs


class LinearizedLaplace(Laplace):
    """Full-covariance Laplace (Immer et al. 2021), exact where a matrix of rows or of columns fits.

    Where neither fits in memory, samples are solved for by conjugate gradients.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    """

    def _approximate(self, work: Work) -> Curvature:
        rows, most = work.rows, _FACTORED.get(work.rows.device.type, 8_000)
        side = rows.n_columns if rows.n_columns <= _SMALL else min(rows.n_rows, rows.n_columns)
        factored = side <= most and 16 * side**2 + normal_bytes(side, rows.device) <= work.available // 2
        if factored and rows.n_columns == side:
            return Primal(normal_matrix(rows))
        if factored:
            return Dual(work.held(work.available // 4))
        vectors = 4 * (work.n_samples + _PRECONDITIONED) * rows.n_columns * rows.dtype.itemsize
        if vectors > work.available:
            msg = (
                f"Samples of {rows.n_columns:,} parameters with a preconditioner take {vectors / 2**20:,.0f} MiB, more "
                f"than the memory limit of {work.available / 2**20:,.0f} MiB: raise memory_limit, or use "
                "nb.baselines.LastLayerLaplace or DiagonalLaplace."
            )
            raise SettingsError(msg)
        generator = torch.Generator().manual_seed(self._seed)
        return MatrixFree(work.held(work.available - vectors), _PRECONDITIONED, generator)

    def _form(self, curvature: Curvature) -> str:
        return {
            "Primal": "all parameters, factored", "Dual": "all rows, factored",
            "MatrixFree": "conjugate gradients",
        }[type(curvature).__name__]  # fmt: skip

    def _rebuilt(self, tensors: Mapping[str, Tensor]) -> Curvature:
        return Primal(tensors["matrix"])
