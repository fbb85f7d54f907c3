r"""Rows held in memory: entries for some columns, outer products for others.

The row of a linear layer with one position an example is an outer product :math:`g_{no} a_n^\top` of an output gradient
and an activation. Held as the two factors it takes :math:`\text{in} + O \cdot \text{out}` numbers an example instead
of :math:`O \cdot \text{in} \cdot \text{out}`, products cost a factor :math:`O` less, and a Gram matrix is an entrywise
product of two small ones. No network is known here: a piece is algebra on a range of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.rows import Block, Rows, symmetric


class Piece(ABC):
    """The rows, restricted to some columns."""

    @abstractmethod
    def take(self, rows: slice) -> Piece:
        """Return a view of some rows."""

    @abstractmethod
    def add_mv(self, vectors: Tensor, result: Tensor) -> None:  # (S, P), (S, m)
        """Add this piece's share of the product to ``result``."""

    @abstractmethod
    def put_rmv(self, vectors: Tensor, result: Tensor) -> None:  # (S, m), (S, P)
        """Write this piece's columns of the transposed product into ``result``."""

    @abstractmethod
    def put_dense(self, result: Tensor) -> None:  # (m, P)
        """Write this piece's entries into ``result``."""

    @abstractmethod
    def cross(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return this piece's share of a tile of the Gram matrix."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return what is held."""

    @abstractmethod
    def allocate(self, n_rows: int) -> Piece:
        """Return a piece of the same kind for ``n_rows`` rows, not filled yet."""

    def fill(self, other: Piece) -> None:
        """Copy the rows of another piece of the same kind and size into this one."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def numbers(self) -> int:
        """Return how many numbers are held."""
        return sum(tensor.numel() for tensor in self.tensors())

    @abstractmethod
    def costs(self) -> tuple[float, float]:
        """Return the operations behind a Gram entry, and behind a row times a vector."""


@dataclass(frozen=True)
class DensePiece(Piece):
    """Entries of consecutive columns."""

    matrix: Tensor  # (m, c)
    column: int  # the first

    def take(self, rows: slice) -> Piece:
        """Return a view of some rows."""
        return DensePiece(self.matrix[rows], self.column)

    def _columns(self) -> slice:
        return slice(self.column, self.column + self.matrix.shape[1])

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Add ``vectors @ B.T``."""
        result.addmm_(vectors[:, self._columns()], self.matrix.T)

    def put_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Write ``vectors @ B``."""
        result[:, self._columns()] = vectors @ self.matrix

    def put_dense(self, result: Tensor) -> None:
        """Write the entries."""
        result[:, self._columns()] = self.matrix

    def cross(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return ``B[rows] @ B[columns].T``."""
        return self.matrix[rows].to(dtype) @ self.matrix[columns].to(dtype).T

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the entries."""
        return (self.matrix,)

    def allocate(self, n_rows: int) -> Piece:
        """Return a piece for ``n_rows`` rows, not filled yet."""
        return DensePiece(self.matrix.new_empty(n_rows, self.matrix.shape[1]), self.column)

    def costs(self) -> tuple[float, float]:
        """Return two operations a column."""
        return 2.0 * self.matrix.shape[1], 2.0 * self.matrix.shape[1]


@dataclass(frozen=True)
class OuterPiece(Piece):
    """Rows ``n * O + o`` that are outer products of ``gradients[n, o]`` and ``activations[n]``, weight and bias."""

    activations: Tensor  # (n, in)
    gradients: Tensor  # (n, O, out)
    weight: int | None  # first column of the (out, in) weight
    bias: int | None  # first column of the (out,) bias

    def take(self, rows: slice) -> Piece:
        """Return a view of the rows of whole examples."""
        outputs = self.gradients.shape[1]
        examples = slice(rows.start // outputs, rows.stop // outputs)
        return OuterPiece(self.activations[examples], self.gradients[examples], self.weight, self.bias)

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Push the activations through each sample's layer, then along the gradients."""
        n, _, out = self.gradients.shape
        fan_in, samples = self.activations.shape[1], len(vectors)
        layer = vectors.new_zeros(n, samples, out)
        if self.weight is not None:
            weights = vectors[:, self.weight : self.weight + out * fan_in].reshape(samples * out, fan_in)
            layer = (self.activations @ weights.T).view(n, samples, out)
        if self.bias is not None:
            layer = layer + vectors[:, self.bias : self.bias + out]
        result += (layer @ self.gradients.mT).transpose(0, 1).reshape(samples, -1)

    def put_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Pull each sample's row weights back along the gradients, then onto the activations."""
        n, outputs, out = self.gradients.shape
        samples = len(vectors)
        layer = vectors.reshape(samples, n, outputs).transpose(0, 1) @ self.gradients  # (n, S, out)
        if self.weight is not None:
            weights = layer.reshape(n, samples * out).T @ self.activations
            result[:, self.weight : self.weight + out * self.activations.shape[1]] = weights.view(samples, -1)
        if self.bias is not None:
            result[:, self.bias : self.bias + out] = layer.sum(0)

    def put_dense(self, result: Tensor) -> None:
        """Write the outer products."""
        n, outputs, out = self.gradients.shape
        if self.weight is not None:
            entries = self.gradients[..., None] * self.activations[:, None, None, :]
            result[:, self.weight : self.weight + out * self.activations.shape[1]] = entries.reshape(n * outputs, -1)
        if self.bias is not None:
            result[:, self.bias : self.bias + out] = self.gradients.reshape(n * outputs, out)

    def cross(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Return the products of activations times the products of gradients, entry by entry."""
        left, right = self.take(rows), self.take(columns)
        assert isinstance(left, OuterPiece)
        assert isinstance(right, OuterPiece)
        (n, outputs, out), m = left.gradients.shape, len(right.gradients)
        similar = left.gradients.reshape(-1, out).to(dtype) @ right.gradients.reshape(-1, out).to(dtype).T
        inner = similar.new_full((n, m), 0.0 if self.bias is None else 1.0)
        if self.weight is not None:
            inner.addmm_(left.activations.to(dtype), right.activations.to(dtype).T)
        return (similar.view(n, outputs, m, outputs) * inner[:, None, :, None]).view(n * outputs, m * outputs)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the factors."""
        return self.activations, self.gradients

    def allocate(self, n_rows: int) -> Piece:
        """Return a piece for the rows of whole examples, not filled yet."""
        n = n_rows // self.gradients.shape[1]
        a, g = (tensor.new_empty(n, *tensor.shape[1:]) for tensor in self.tensors())
        return OuterPiece(a, g, self.weight, self.bias)

    def costs(self) -> tuple[float, float]:
        """Return the operations behind a Gram entry, and behind a row times a vector."""
        _, outputs, out = self.gradients.shape
        fan_in = self.activations.shape[1]
        return 2.0 * out + 2.0 * fan_in / outputs**2 + 2.0, 2.0 * out * (fan_in / outputs + 1.0)


@dataclass(frozen=True)
class HeldBlock(Block):
    """Some rows of every piece."""

    pieces: tuple[Piece, ...]
    n_rows: int
    n_columns: int
    granule: int
    like: Tensor  # dtype and device

    def mv(self, vectors: Tensor) -> Tensor:
        """Multiply: ``vectors @ B.T``."""
        result = vectors.new_zeros(len(vectors), self.n_rows)
        for piece in self.pieces:
            piece.add_mv(vectors, result)
        return result

    def rmv(self, vectors: Tensor) -> Tensor:
        """Multiply with the transpose: ``vectors @ B``."""
        result = vectors.new_zeros(len(vectors), self.n_columns)
        for piece in self.pieces:
            piece.put_rmv(vectors, result)
        return result

    def dense(self) -> Tensor:
        """Return the entries."""
        result = self.like.new_zeros(self.n_rows, self.n_columns)
        for piece in self.pieces:
            piece.put_dense(result)
        return result

    def gram(self, dtype: torch.dtype) -> Tensor:
        """Return ``B @ B.T``, summed over the pieces a tile at a time."""

        def cross(rows: slice, columns: slice) -> Tensor:
            tile = self.pieces[0].cross(rows, columns, dtype)
            for piece in self.pieces[1:]:
                tile += piece.cross(rows, columns, dtype)
            return tile

        return symmetric(self.n_rows, self.granule, cross, dtype=dtype, device=self.like.device)


class HeldRows(Rows):
    """Rows held in memory as pieces.

    Parameters
    ----------
    pieces : sequence of Piece
        Disjoint columns; columns that no piece has are zero.
    n_rows, n_columns : int
        The shape of the matrix.
    like : Tensor
        Whose dtype and device the vectors have.
    granule : int
        Rows that belong together; a multiple of what each piece can be cut at.
    block_rows : int, optional
        The block size that a projector takes when it is not told another.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        n_rows: int,
        n_columns: int,
        like: Tensor,
        granule: int = 1,
        block_rows: int | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self.n_rows, self.n_columns, self.granule, self.block_rows = n_rows, n_columns, granule, block_rows
        self._like = like.new_empty(0)
        self.dtype, self.device = like.dtype, like.device

    def block(self, start: int, stop: int) -> Block:
        """Return rows ``start`` to ``stop``: views."""
        if start % self.granule or stop % self.granule:
            msg = f"Rows {start} to {stop} cut through rows that belong together, {self.granule} at a time."
            raise SettingsError(msg)
        pieces = tuple(piece.take(slice(start, stop)) for piece in self.pieces)
        return HeldBlock(pieces, stop - start, self.n_columns, self.granule, self._like)

    def gram_cost(self) -> float:
        """Return the floating-point operations behind one entry of a Gram matrix."""
        return sum(piece.costs()[0] for piece in self.pieces)

    def product_cost(self) -> float:
        """Return the floating-point operations of one row times one vector."""
        return sum(piece.costs()[1] for piece in self.pieces)

    def kept_bytes(self) -> int:
        """Return 0: they are held already."""
        return 0

    def keep(self) -> Rows:
        """Return itself."""
        return self


class DenseRows(HeldRows):
    """A matrix held in memory, whole.

    Parameters
    ----------
    matrix : Tensor (R, P)
        The entries; not copied.
    block_rows : int, optional
        The block size that a projector takes when it is not told another.

    Examples
    --------
    >>> import torch
    >>> rows = DenseRows(torch.eye(3, 5))
    >>> rows.norms(torch.ones(1, 5))
    tensor([1.7321], dtype=torch.float64)
    """

    def __init__(self, matrix: Tensor, block_rows: int | None = None) -> None:
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
