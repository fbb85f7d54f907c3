"""Rows that are held in memory as pieces, and blocks of them that are held or formed when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.limits import RowCosts, Storage, half_is_fast, tile_rows
from nullbayes.linalg.halves_gram import gram_by_halves, has_halves
from nullbayes.linalg.pieces import DensePiece, Factors, Piece, normal_flops
from nullbayes.linalg.rows import Block, Rows


@dataclass(frozen=True)
class HeldBlock(Block):
    """Some rows of every piece."""

    pieces: tuple[Piece, ...]
    n_rows: int
    n_columns: int
    rows_per_example: int
    like: Tensor  # dtype and device
    working_bytes: int = 2**28  # temporary memory of products

    def mv(self, vectors: Tensor) -> Tensor:
        """Multiply: ``vectors @ B.T``."""
        result = vectors.new_zeros(len(vectors), self.n_rows)
        for part, rows in self._parts(len(vectors)):
            part.add_mv(vectors, result[:, rows])
        return result

    def rmv(self, vectors: Tensor) -> Tensor:
        """Multiply with the transpose: ``vectors @ B``."""
        result = vectors.new_zeros(len(vectors), self.n_columns)
        for part, rows in self._parts(len(vectors)):
            part.add_rmv(vectors[:, rows], result)
        return result

    def _parts(self, n_vectors: int) -> Iterator[tuple[Piece, slice]]:
        """Iterate over the parts of pieces that a product takes at a time, and their rows."""
        for piece in self.pieces:
            fixed, each = piece.product_bytes
            at_once = int(self.working_bytes / max(1.0, fixed + each * n_vectors))
            step = max(1, at_once // self.rows_per_example) * self.rows_per_example
            if step >= self.n_rows:
                yield piece, slice(0, self.n_rows)
                continue
            for start in range(0, self.n_rows, step):
                rows = slice(start, min(self.n_rows, start + step))
                yield piece.take(rows), rows

    def dense(self) -> Tensor:
        """Return the entries."""
        result = self.like.new_zeros(self.n_rows, self.n_columns)
        for piece in self.pieces:
            piece.put_dense(result)
        return result

    def gram(self, dtype: torch.dtype) -> Tensor:
        """Return ``B @ B.T``, one tile at a time; in float32 from halves, where entries are not held in full."""
        if dtype == torch.float32 and has_halves(self.pieces) and half_is_fast(self.like.device):
            return gram_by_halves(self.pieces, self.n_rows, self.rows_per_example, self.working_bytes)
        result = torch.empty(self.n_rows, self.n_rows, dtype=dtype, device=self.like.device)
        fill_gram(result, self, self, symmetric=True)
        return result

    def cross(self, other: HeldBlock, dtype: torch.dtype) -> Tensor:  # (m, m')
        """Return ``B @ other.T``, summed over the pieces."""
        pairs = zip(self.pieces, other.pieces, strict=True)
        tiles = (a.cross(b, dtype, self.working_bytes) for a, b in pairs)
        total = next(tiles)
        for tile in tiles:
            total += tile
        return total

    def part(self, rows: slice) -> HeldBlock:
        """Return some of the rows: views."""
        pieces = tuple(piece.take(rows) for piece in self.pieces)
        n_rows = rows.stop - rows.start
        return HeldBlock(pieces, n_rows, self.n_columns, self.rows_per_example, self.like, self.working_bytes)

    def factors(self) -> list[Factors]:
        """Return the factors of every piece."""
        return [factors for piece in self.pieces for factors in piece.factors(self.rows_per_example)]

    def add_squares(self, result: Tensor) -> None:  # (m,)
        """Add the squares of the entries of each row to ``result``, piece by piece."""
        for part, rows in self._parts(1):
            part.add_squares(self.rows_per_example, result[rows])


def fill_gram(result: Tensor, left: HeldBlock, right: HeldBlock, *, symmetric: bool = False) -> None:  # (m, m')
    """Write ``left @ right.T`` into ``result``, one tile at a time; half the tiles of a symmetric one are copies."""
    step = max(1, tile_rows(result.device, left.working_bytes) // left.rows_per_example) * left.rows_per_example
    for i in range(0, left.n_rows, step):
        rows = slice(i, min(left.n_rows, i + step))
        for j in range(0, rows.stop if symmetric else right.n_rows, step):
            columns = slice(j, min(right.n_rows, j + step))
            result[rows, columns] = left.part(rows).cross(right.part(columns), result.dtype)
            if symmetric and i != j:
                result[columns, rows] = result[rows, columns].T


@dataclass(frozen=True)
class StreamedBlock(Block):
    """Rows that do not fit in memory together: their parts are formed whenever they are needed."""

    parts: tuple[slice, ...]
    form: Callable[[slice], HeldBlock]
    n_rows: int
    like: Tensor

    def mv(self, vectors: Tensor) -> Tensor:
        """Multiply: ``vectors @ B.T``."""
        return torch.cat([self.form(part).mv(vectors) for part in self.parts], dim=1)

    def rmv(self, vectors: Tensor) -> Tensor:
        """Multiply with the transpose: ``vectors @ B``."""
        products = (self.form(part).rmv(vectors[:, part]) for part in self.parts)
        total = next(products)
        for product in products:
            total += product
        return total

    def dense(self) -> Tensor:
        """Return the entries."""
        return torch.cat([self.form(part).dense() for part in self.parts])

    def gram(self, dtype: torch.dtype) -> Tensor:
        """Return ``B @ B.T``, with two parts in memory at a time."""
        result = torch.empty(self.n_rows, self.n_rows, dtype=dtype, device=self.like.device)
        for i, rows in enumerate(self.parts):
            left = self.form(rows)
            fill_gram(result[rows, rows], left, left, symmetric=True)
            for columns in self.parts[:i]:
                fill_gram(result[rows, columns], left, self.form(columns))
                result[columns, rows] = result[rows, columns].T
        return result


class HeldRows(Rows):
    """Rows held in memory as pieces.

    Parameters
    ----------
    pieces : sequence of Piece
        Disjoint ranges of columns; columns without a piece are zero.
    n_rows, n_columns : int
        The shape of the matrix.
    like : Tensor
        Has the dtype and the device of the vectors.
    rows_per_example : int
        Rows per example; blocks are cut at multiples of it.
    block_rows : int, optional
        The block size that a projector takes unless its settings name another.
    reference : Rows, optional
        The rows that these approximate in half precision.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        n_rows: int,
        n_columns: int,
        like: Tensor,
        rows_per_example: int = 1,
        block_rows: int | None = None,
        reference: Rows | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self.n_rows, self.n_columns = n_rows, n_columns
        self.rows_per_example, self.block_rows = rows_per_example, block_rows
        self._reference = reference
        self._like = like.new_empty(0)
        self.dtype, self.device = like.dtype, like.device

    def block(self, start: int, stop: int) -> HeldBlock:
        """Return rows ``start`` to ``stop``: views, or copies on the device of rows on the host."""
        if start % self.rows_per_example or stop % self.rows_per_example:
            msg = f"Rows {start} to {stop} cut through rows that belong together, {self.rows_per_example} at a time."
            raise SettingsError(msg)
        pieces = tuple(piece.take(slice(start, stop)).to(self.device) for piece in self.pieces)
        return HeldBlock(pieces, stop - start, self.n_columns, self.rows_per_example, self._like, self.working_bytes)

    @property
    def numbers_per_row(self) -> int:
        """Stored numbers per row."""
        return sum(tensor.numel() for piece in self.pieces for tensor in piece.tensors()) // self.n_rows

    @property
    def reference(self) -> Rows:
        """The rows that these approximate, or themselves."""
        return self._reference or self

    @property
    def rows_per_normal_pass(self) -> int:
        """All rows, if they are on the device and need no entries: views cost nothing."""
        if any(piece.compact for piece in self.pieces):
            return self._round_to_examples(self.working_bytes // (16 * self.n_columns))
        here = all(tensor.device == self.device for piece in self.pieces for tensor in piece.tensors())
        return self.n_rows if here else self.rows_per_pass

    def costs(self, storage: Storage = "device") -> RowCosts:
        """Return what the rows cost, where they are."""
        each = self.rows_per_example
        factors = [f for piece in self.pieces for f in piece.take(slice(0, each)).factors(each)]
        return RowCosts(
            *self._shape,
            storage=storage,
            pieces=tuple(piece.costs() for piece in self.pieces),
            full_bytes=0,
            held_bytes=0,
            normal_flops=normal_flops(factors) * self.n_rows / each,
        )

    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return these rows, which are held already."""
        return self


class DenseRows(HeldRows):
    """Use a matrix in memory as rows.

    Parameters
    ----------
    matrix : Tensor (R, P)
        The entries; they are not copied.
    block_rows : int, optional
        The block size that a projector takes unless its settings name another.

    Raises
    ------
    SettingsError
        If the matrix is not a dense floating-point tensor of finite numbers with at least one row and one column.

    Examples
    --------
    >>> import torch
    >>> rows = DenseRows(torch.eye(3, 5))
    >>> rows.norms(torch.ones(1, 5))
    tensor([1.7321], dtype=torch.float64)
    """

    def __init__(self, matrix: Tensor, block_rows: int | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.layout != torch.strided:
            what = f"a {matrix.layout} one" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
            msg = f"DenseRows takes a dense tensor, not {what}: torch.as_tensor(matrix) or matrix.to_dense() makes one."
            raise SettingsError(msg)
        if matrix.ndim != 2 or 0 in matrix.shape:
            msg = f"DenseRows takes a matrix of at least one row and one column, not shape {tuple(matrix.shape)}."
            raise SettingsError(msg)
        if not matrix.is_floating_point():
            msg = f"DenseRows takes floating-point entries, not {matrix.dtype}: convert it with matrix.double()."
            raise SettingsError(msg)
        if not torch.isfinite(matrix).all():
            msg = "DenseRows found NaN or Inf among the entries of the matrix."
            raise SettingsError(msg)
        if block_rows is not None and block_rows < 1:
            msg = f"block_rows must be at least 1, not {block_rows}."
            raise SettingsError(msg)
        matrix = matrix.detach()
        n_rows, n_columns = matrix.shape
        super().__init__(
            [DensePiece(matrix, 0)], n_rows=n_rows, n_columns=n_columns, like=matrix, block_rows=block_rows
        )
