"""Rows that are known by their products alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.limits import PRODUCT_COPIES
from nullbayes.linalg.held import DenseRows
from nullbayes.linalg.rows import Block, Rows
from nullbayes.precision import full_precision

_COMPARED = 256  # rows on which the two functions are compared


@dataclass(frozen=True)
class ProductBlock(Block):
    """Some rows as two functions; entries come from products with unit vectors."""

    n_rows: int
    n_columns: int
    forward: Callable[[Tensor], Tensor]  # (S, P) -> (S, m)
    transposed: Callable[[Tensor], Tensor]  # (S, m) -> (S, P)
    like: Tensor  # dtype and device
    working_bytes: int = 2**28  # temporary memory

    def mv(self, vectors: Tensor) -> Tensor:
        """Multiply: ``vectors @ B.T``."""
        return self.forward(vectors)

    def rmv(self, vectors: Tensor) -> Tensor:
        """Multiply with the transpose: ``vectors @ B``."""
        return self.transposed(vectors)

    def dense(self) -> Tensor:
        """Return the entries: the transpose times the identity."""
        return self.transposed(torch.eye(self.n_rows, dtype=self.like.dtype, device=self.like.device))

    def gram(self, dtype: torch.dtype) -> Tensor:
        """Return ``B @ B.T`` from the entries, or from products of products where they do not fit in memory."""
        step = max(1, self.working_bytes // (PRODUCT_COPIES * self.n_columns * self.like.element_size()))
        if self.n_rows <= step:
            entries = self.dense().to(dtype)
            return entries @ entries.T
        result = torch.empty(self.n_rows, self.n_rows, dtype=dtype, device=self.like.device)
        for start in range(0, self.n_rows, step):
            stop = min(self.n_rows, start + step)
            units = torch.zeros(stop - start, self.n_rows, dtype=self.like.dtype, device=self.like.device)
            units[:, start:stop].fill_diagonal_(1.0)
            result[start:stop] = self.forward(self.transposed(units))
        for start in range(0, self.n_rows, step):  # rounding leaves it unsymmetric
            stop = min(self.n_rows, start + step)
            corner, below = result[start:stop, start:stop], result[stop:, start:stop]
            corner.add_(corner.T.clone()).mul_(0.5)
            below.add_(result[start:stop, stop:].T).mul_(0.5)
            result[start:stop, stop:] = below.T
        return result


class MatrixFreeRows(Rows):
    """Use two functions that multiply with a range of rows of a matrix as rows.

    The two functions are compared once, on the first rows, because projectors cannot see what one of them leaves out.

    Parameters
    ----------
    jvp : callable (vectors (S, P), rows: slice) -> (S, m)
        ``vectors @ A[rows].T``
    vjp : callable (vectors (S, m), rows: slice) -> (S, P)
        ``vectors @ A[rows]``
    n_rows, n_columns : int
        The shape of the matrix.
    block_rows : int, optional
        The block size that a projector takes unless its settings name another.
    dtype, device
        Of the vectors that the functions take.

    Raises
    ------
    SettingsError
        If the functions return NaN, or tensors of another shape, or are not each other's transpose.

    Examples
    --------
    >>> import torch
    >>> A = torch.eye(2, 3)
    >>> rows = MatrixFreeRows(lambda v, part: v @ A[part].T, lambda u, part: u @ A[part], n_rows=2, n_columns=3)
    >>> rows.mv(torch.ones(1, 3))
    tensor([[1., 1.]])
    """

    def __init__(
        self,
        jvp: Callable[[Tensor, slice], Tensor],
        vjp: Callable[[Tensor, slice], Tensor],
        *,
        n_rows: int,
        n_columns: int,
        block_rows: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if n_rows < 1 or n_columns < 1:
            msg = f"A matrix needs at least one row and one column, not {n_rows} and {n_columns}."
            raise SettingsError(msg)
        if block_rows is not None and block_rows < 1:
            msg = f"block_rows must be at least 1, not {block_rows}."
            raise SettingsError(msg)
        self._jvp, self._vjp = jvp, vjp
        self.n_rows, self.n_columns, self.block_rows = n_rows, n_columns, block_rows
        self.dtype = dtype if dtype is not None else torch.get_default_dtype()
        if not self.dtype.is_floating_point:
            msg = f"MatrixFreeRows multiplies floating-point vectors, not {self.dtype}: pass dtype=torch.float64."
            raise SettingsError(msg)
        self.device = torch.device(device)
        self._compare(min(n_rows, block_rows or _COMPARED))

    def block(self, start: int, stop: int) -> Block:
        """Return rows ``start`` to ``stop`` as products."""
        where = slice(start, stop)
        return ProductBlock(
            n_rows=stop - start,
            n_columns=self.n_columns,
            forward=lambda vectors: self._checked(self._jvp(vectors, where), (len(vectors), stop - start), "jvp"),
            transposed=lambda vectors: self._checked(self._vjp(vectors, where), (len(vectors), self.n_columns), "vjp"),
            like=torch.empty(0, dtype=self.dtype, device=self.device),
            working_bytes=self.working_bytes,
        )

    def _checked(self, product: Tensor, shape: tuple[int, int], name: str) -> Tensor:
        if not isinstance(product, Tensor) or product.shape != shape:
            what = f"shape {tuple(product.shape)}" if isinstance(product, Tensor) else type(product).__name__
            msg = (
                f"{name} must return a tensor of shape {shape}, one row per vector, for the rows asked for, not {what}."
            )
            raise SettingsError(msg)
        return product.to(self.device, self.dtype)

    @full_precision()
    def _compare(self, n_rows: int) -> None:
        """Refuse functions that are not each other's transpose on the first rows: u · (A v) = (A⊤ u) · v."""
        block, generator = self.block(0, n_rows), torch.Generator().manual_seed(0)
        u, v = (
            torch.randn(1, size, generator=generator, dtype=torch.float64, device="cpu").to(self.device, self.dtype)
            for size in (n_rows, self.n_columns)
        )
        forward, back = block.mv(v).double(), block.rmv(u).double()
        left, right = (u.double() * forward).sum(), (v.double() * back).sum()
        if not bool(torch.isfinite(left - right)):
            msg = f"jvp or vjp returns NaN or Inf on the first {n_rows} rows: look for extreme values in them."
            raise SettingsError(msg)
        scale = u.double().norm() * forward.norm() + v.double().norm() * back.norm()
        if bool((left - right).abs() > torch.finfo(self.dtype).eps ** 0.5 * scale):
            msg = (
                f"jvp and vjp do not belong to the same matrix: u · jvp(v) is {float(left):.4g} and vjp(u) · v is "
                f"{float(right):.4g} on its first {n_rows} rows. jvp is vectors @ A[rows].T, vjp is vectors @ A[rows]."
            )
            raise SettingsError(msg)

    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return the same rows with all entries in memory, on the device."""
        return DenseRows(self.dense(), self.block_rows)
