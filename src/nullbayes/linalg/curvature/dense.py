r"""The whole matrix :math:`A^\top A`, by a Cholesky factor of :math:`A^\top A` itself or of :math:`A A^\top`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.linalg.curvature.base import Curvature, padded
from nullbayes.linalg.rows import Rows

FACTORED_BYTES = 24  # per entry of the matrix: itself, with a shift, and the factor
_SAVED_BYTES = 2**31  # a larger matrix is not written to a file


class _Shifted:
    r"""A symmetric matrix M, its eigenvalues, and the factor of :math:`M + \alpha I` at the last :math:`\alpha`."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self._at: float | None = None
        self._factor = matrix[:0]
        self._values: Tensor | None = None

    def factor(self, alpha: float) -> Tensor:
        """Return the lower Cholesky factor."""
        if self._at != alpha:
            self._at, self._factor = None, self.matrix[:0]  # before the next one is formed
            shifted = self.matrix.clone()
            shifted.diagonal().add_(alpha)
            factor, info = torch.linalg.cholesky_ex(shifted)
            if int(info) != 0:
                msg = (
                    f"The Gauss-Newton matrix with a prior precision of {alpha:g} is not positive definite in float64: "
                    "use a larger prior_precision."
                )
                raise NullBayesError(msg)
            self._at, self._factor = alpha, factor
        return self._factor

    def values(self) -> Tensor:
        if self._values is None:
            self._values = torch.linalg.eigvalsh(self.matrix)
        return self._values


class Primal(Curvature):
    r"""The matrix itself, which takes :math:`8 P^2` bytes, and its factor, which takes as much again.

    While the factor is computed, there is a third matrix.

    Parameters
    ----------
    matrix : Tensor (P, P)
        The matrix, in float64.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.n_columns = self.rank = len(matrix)
        self._shifted = _Shifted(matrix)

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        r"""Solve with the transposed factor: :math:`L^{-\top}\varepsilon`."""
        factor = self._shifted.factor(alpha)
        solved: Tensor = torch.linalg.solve_triangular(factor.mT, noise.to(factor).T, upper=True)
        return solved.T.to(noise.dtype)

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        r"""Return :math:`\|L^{-1} r\|^2` for each row."""
        factor = self._shifted.factor(alpha)
        solved: Tensor = torch.linalg.solve_triangular(factor, rows.to(factor).T, upper=False)
        return solved.square().sum(0).to(rows.dtype)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return all eigenvalues."""
        return padded(self._shifted.values(), self.n_columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrix, unless it is too large for a file."""
        return {"matrix": self.matrix} if self.matrix.numel() * 8 <= _SAVED_BYTES else {}


class Dual(Curvature):
    r"""The matrix :math:`A^\top A` by the Gram matrix of its R rows, for R < P; takes :math:`8 R^2` bytes, twice.

    A sample draws :math:`w` from the prior and corrects it by noise on the rows (Matheron's rule):
    :math:`w + A^\top (A A^\top + \alpha I)^{-1} (\varepsilon - A w)`, without cancellation of large numbers.

    Parameters
    ----------
    rows : Rows
        The rows, which are kept: every new :math:`\alpha` multiplies with them again.
    """

    rows: Rows

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.n_columns, self.rank = rows.n_columns, rows.n_rows
        self._shifted = _Shifted(rows.block(0, rows.n_rows).gram(torch.float64))

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Draw from the prior and correct by noise on the rows."""
        prior = noise[:, : self.n_columns] / math.sqrt(alpha)
        wanted = noise[:, self.n_columns :].double() - self.rows.mv(prior).double()
        return prior + self.rows.rmv(self._solve(wanted, alpha).to(prior.dtype))

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        r"""Return :math:`|u|^2 + |r - A^\top u|^2/\alpha` with :math:`u = (A A^\top + \alpha I)^{-1} A r`.

        The second term is the remainder of a row that the others explain, divided by :math:`\alpha`. It is far below
        the rounding of a product in float32, so these products are computed in float64.
        """
        left = rows.double()
        seen = torch.cat([left @ part.T for _, part in self._wide()], dim=1)  # (m, R)
        solved = self._solve(seen, alpha)
        for where, part in self._wide():
            left = left - solved[:, where] @ part
        return (solved.square().sum(1) + left.square().sum(1) / alpha).to(rows.dtype)

    def _wide(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over the entries of the rows in float64, as many at a time as the rows' working memory allows."""
        at_once = max(1, self.rows.working_bytes // (16 * self.n_columns))
        for where, block in self.rows.blocks(at_once):
            yield where, block.dense().double()

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues of the Gram matrix, and zero for the remaining columns."""
        return padded(self._shifted.values(), self.n_columns)

    def _solve(self, vectors: Tensor, alpha: float) -> Tensor:  # (S, R) -> (S, R)
        solved: Tensor = torch.cholesky_solve(vectors.T, self._shifted.factor(alpha))
        return solved.T
