r"""Pieces of rows: entries for some columns, outer products for others.

The row of a linear layer with one position an example is an outer product :math:`g_{no} a_n^\top` of an output gradient
and an activation. Held as the two factors it takes :math:`\text{in} + O \cdot \text{out}` numbers an example instead
of :math:`O \cdot \text{in} \cdot \text{out}`, products cost a factor :math:`O` less, and a Gram matrix is an entrywise
product of two small ones. No network is known here: a piece is algebra on a range of columns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nullbayes.precision import tensor_float32

_FEW = 4  # examples
_TILE_ROWS = {"cpu": 1000, "cuda": 4096}  # of a Gram matrix: enough for full speed


def tile_rows(device: torch.device, working_bytes: int) -> int:
    """Return the rows of a tile of a Gram matrix, so that three of float64 take half of the working bytes."""
    return max(1, min(_TILE_ROWS.get(device.type, 1000), math.isqrt(working_bytes // 48)))


class Factors(NamedTuple):
    """Rows ``n * O + o`` over some columns as ``gradients[n, o] ⊗ activations[n]``; None stands for a single one."""

    gradients: Tensor  # (n, O, q)
    activations: Tensor | None  # (n, r)
    column: int  # the first of q * r


class Piece(ABC):
    """The rows, restricted to some columns."""

    @abstractmethod
    def take(self, rows: slice) -> Piece:
        """Return a view of some rows."""

    @abstractmethod
    def add_mv(self, vectors: Tensor, result: Tensor) -> None:  # (S, P), (S, m)
        """Add this piece's share of the product to ``result``."""

    @abstractmethod
    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:  # (S, m), (S, P)
        """Add the transposed product to this piece's columns of ``result``."""

    @abstractmethod
    def put_dense(self, result: Tensor) -> None:  # (m, P)
        """Write this piece's entries into ``result``."""

    @abstractmethod
    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:  # (m, m')
        """Return this piece's rows times those of another of the same kind and columns: a tile of a Gram matrix."""

    @abstractmethod
    def factors(self, granule: int) -> list[Factors]:
        """Return the piece as products of gradients and activations, ``granule`` rows an example."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Return what is held."""

    @abstractmethod
    def of(self, tensors: tuple[Tensor, ...]) -> Piece:
        """Return a piece of the same kind and columns that holds other tensors."""

    @abstractmethod
    def sizes(self, n_rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of what a piece of this kind holds for ``n_rows`` rows."""

    @abstractmethod
    def costs(self) -> tuple[float, float]:
        """Return the operations behind a Gram entry, and behind a row times a vector."""

    @abstractmethod
    def outline(self, outputs: int) -> Piece:
        """Return the piece of one example with so many rows, as shapes without entries: to count with."""

    def allocate(self, n_rows: int, device: torch.device) -> Piece:
        """Return a piece of the same kind for ``n_rows`` rows, not filled yet; pinned, if it is for a GPU's use."""

        def empty(size: tuple[int, ...], like: Tensor) -> Tensor:
            pinned = like.device.type == "cuda" and device.type == "cpu"
            return torch.empty(size, dtype=like.dtype, device=device, pin_memory=pinned)

        return self.of(tuple(empty(size, t) for size, t in zip(self.sizes(n_rows), self.tensors(), strict=True)))

    def fill(self, other: Piece) -> None:
        """Copy the rows of another piece of the same kind and size into this one."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def to(self, device: torch.device) -> Piece:
        """Return the piece on a device; itself if it lies there."""
        return self.of(tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors()))

    def halved(self) -> Piece:
        """Return the piece in half the memory and at least ten bits, if it is large enough to matter."""
        return self

    def product_bytes(self, n_vectors: int) -> float:
        """Return the bytes that products take for a moment, for each row, with so many vectors."""
        return 0.0

    def n_bytes(self) -> int:
        """Return the bytes that are held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


@dataclass(frozen=True)
class DensePiece(Piece):
    """Entries of consecutive columns."""

    matrix: Tensor  # (m, c)
    column: int  # the first

    def take(self, rows: slice) -> Piece:
        """Return a view of some rows."""
        return DensePiece(self.matrix[rows], self.column)

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Add ``vectors @ B.T``."""
        if len(self.matrix) < len(vectors):  # what is narrow goes first: the other order takes half as long again
            result += (self.matrix @ vectors[:, _columns(self)].T).T
        else:
            result.addmm_(vectors[:, _columns(self)], self.matrix.T)

    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Add ``vectors @ B``."""
        result[:, _columns(self)].addmm_(vectors, self.matrix)

    def put_dense(self, result: Tensor) -> None:
        """Write the entries."""
        result[:, _columns(self)] = self.matrix

    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:
        """Return ``B @ other.T``."""
        return _cross(self.matrix, other.matrix, dtype, working_bytes)

    def factors(self, granule: int) -> list[Factors]:
        """Return the entries, example by example."""
        return [Factors(self.matrix.view(-1, granule, self.matrix.shape[1]), None, self.column)]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the entries."""
        return (self.matrix,)

    def of(self, tensors: tuple[Tensor, ...]) -> Piece:
        """Return the same columns with other entries."""
        return DensePiece(tensors[0], self.column)

    def sizes(self, n_rows: int) -> list[tuple[int, ...]]:
        """Return the shape of the entries."""
        return [(n_rows, self.matrix.shape[1])]

    def outline(self, outputs: int) -> Piece:
        """Return as many rows of the same columns."""
        return DensePiece(_shape_alone(self.matrix, outputs, self.matrix.shape[1]), self.column)

    def halved(self) -> Piece:
        """Return the entries in float16, each row scaled by a power of two."""
        if self.matrix.is_meta:  # an outline, for which torch would work out every step in Python
            scale = torch.empty(len(self.matrix), 1, dtype=torch.float32, device="meta")
            return HalfPiece(self.matrix.half(), scale, self.column)
        largest = self.matrix.abs().amax(1, keepdim=True).float()
        scale = torch.exp2(torch.frexp(largest)[1].float() - 8.0)  # entries up to 256: small ones keep their bits
        return HalfPiece((self.matrix / scale).half(), torch.where(largest > 0, scale, 1.0), self.column)

    def costs(self) -> tuple[float, float]:
        """Return two operations a column."""
        return 2.0 * self.matrix.shape[1], 2.0 * self.matrix.shape[1]


@dataclass(frozen=True)
class HalfPiece(Piece):
    """Entries in float16, with a scale a row; products widen them, and lose nothing more."""

    matrix: Tensor  # (m, c) float16
    scale: Tensor  # (m, 1) float32, powers of two
    column: int

    def take(self, rows: slice) -> Piece:
        """Return a view of some rows."""
        return HalfPiece(self.matrix[rows], self.scale[rows], self.column)

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Add ``vectors @ B.T``."""
        entries = self.matrix.to(vectors.dtype)
        result += (vectors[:, _columns(self)] @ entries.T) * self.scale[:, 0]

    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Add ``vectors @ B``."""
        result[:, _columns(self)].addmm_(vectors * self.scale[:, 0], self.matrix.to(vectors.dtype))

    def product_bytes(self, n_vectors: int) -> float:
        """Return the bytes of the widened entries."""
        return 4.0 * self.matrix.shape[1] + 8.0 * n_vectors

    def put_dense(self, result: Tensor) -> None:
        """Write the entries."""
        result[:, _columns(self)] = self.matrix
        result[:, _columns(self)] *= self.scale

    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:
        """Return ``B @ other.T``; ten bits pass through TF32 products unchanged."""
        with tensor_float32():
            tile = _cross(self.matrix, other.matrix, dtype, working_bytes)
        return tile.mul_(self.scale).mul_(other.scale.T)

    def factors(self, granule: int) -> list[Factors]:
        """Return the entries, widened."""
        entries = self.matrix.float() * self.scale
        return [Factors(entries.view(-1, granule, entries.shape[1]), None, self.column)]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the entries and their scales."""
        return self.matrix, self.scale

    def of(self, tensors: tuple[Tensor, ...]) -> Piece:
        """Return the same columns with other entries."""
        return HalfPiece(tensors[0], tensors[1], self.column)

    def sizes(self, n_rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of entries and scales."""
        return [(n_rows, self.matrix.shape[1]), (n_rows, 1)]

    def outline(self, outputs: int) -> Piece:
        """Return as many rows of the same columns."""
        columns = self.matrix.shape[1]
        return self.of((_shape_alone(self.matrix, outputs, columns), _shape_alone(self.scale, outputs, 1)))

    def costs(self) -> tuple[float, float]:
        """Return two operations a column."""
        return 2.0 * self.matrix.shape[1], 2.0 * self.matrix.shape[1]


def _shape_alone(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _cross(left: Tensor, right: Tensor, dtype: torch.dtype, working_bytes: int) -> Tensor:  # (m, m')
    """Return ``left @ right.T`` in a precision, widening some columns at a time where that takes a copy."""
    if left.dtype == dtype:
        return left @ right.T
    step = max(1, working_bytes // (2 * dtype.itemsize * (len(left) + len(right))))
    chunks = zip(left.split(step, dim=1), right.split(step, dim=1), strict=True)
    total = torch.zeros(len(left), len(right), dtype=dtype, device=left.device)
    for a, b in chunks:
        total.addmm_(a.to(dtype), b.to(dtype).T)
    return total


def _columns(piece: DensePiece | HalfPiece) -> slice:
    return slice(piece.column, piece.column + piece.matrix.shape[1])


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
        return self.of((self.activations[examples], self.gradients[examples]))

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Push the activations through each sample's layer, then along the gradients."""
        n, _, out = self.gradients.shape
        fan_in, samples = self.activations.shape[1], len(vectors)
        if self.weight is not None:
            weights = vectors[:, self.weight : self.weight + out * fan_in]
            if n <= _FEW:  # the copy below would take longer than the product
                each = weights.unflatten(1, (out, fan_in)).mT
                layer = torch.bmm(self.activations.expand(samples, n, fan_in), each).transpose(0, 1)
            else:
                layer = (self.activations @ weights.reshape(samples * out, fan_in).T).view(n, samples, out)
            del weights
        else:
            layer = vectors.new_zeros(n, samples, out)
        if self.bias is not None:
            layer += vectors[:, self.bias : self.bias + out]
        result += (layer @ self.gradients.mT).transpose(0, 1).reshape(samples, -1)

    def product_bytes(self, n_vectors: int) -> float:
        """Return the bytes of what lies between the two products."""
        _, outputs, out = self.gradients.shape
        return self.gradients.element_size() * n_vectors * (out / outputs + 2.0)

    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Pull each sample's row weights back along the gradients, then onto the activations."""
        n, outputs, out = self.gradients.shape
        samples = len(vectors)
        layer = vectors.reshape(samples, n, outputs).transpose(0, 1) @ self.gradients  # (n, S, out)
        if self.weight is not None:
            weights = layer.reshape(n, samples * out).T @ self.activations
            result[:, self.weight : self.weight + out * self.activations.shape[1]] += weights.view(samples, -1)
        if self.bias is not None:
            result[:, self.bias : self.bias + out] += layer.sum(0)

    def put_dense(self, result: Tensor) -> None:
        """Write the outer products."""
        n, outputs, out = self.gradients.shape
        if self.weight is not None:
            entries = self.gradients[..., None] * self.activations[:, None, None, :]
            result[:, self.weight : self.weight + out * self.activations.shape[1]] = entries.reshape(n * outputs, -1)
        if self.bias is not None:
            result[:, self.bias : self.bias + out] = self.gradients.reshape(n * outputs, out)

    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:
        """Return the products of activations times the products of gradients, entry by entry."""
        (n, outputs, out), m = self.gradients.shape, len(other.gradients)
        similar = _cross(self.gradients.reshape(-1, out), other.gradients.reshape(-1, out), dtype, working_bytes)
        inner = similar.new_zeros(1, 1).expand(n, m)
        if self.weight is not None:
            inner = _cross(self.activations, other.activations, dtype, working_bytes)
        if self.bias is not None:
            inner = inner + 1.0
        return similar.view(n, outputs, m, outputs).mul_(inner[:, None, :, None]).view(n * outputs, m * outputs)

    def factors(self, granule: int) -> list[Factors]:
        """Return the factors of the weight, and the gradients for the bias."""
        weight = [] if self.weight is None else [Factors(self.gradients, self.activations, self.weight)]
        return weight + ([] if self.bias is None else [Factors(self.gradients, None, self.bias)])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the factors."""
        return self.activations, self.gradients

    def of(self, tensors: tuple[Tensor, ...]) -> Piece:
        """Return the same columns with other factors."""
        return OuterPiece(tensors[0], tensors[1], self.weight, self.bias)

    def sizes(self, n_rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of the factors for the rows of whole examples."""
        n = n_rows // self.gradients.shape[1]
        return [(n, *tensor.shape[1:]) for tensor in self.tensors()]

    def outline(self, outputs: int) -> Piece:
        """Return the factors of one example with so many outputs."""
        activations = _shape_alone(self.activations, 1, self.activations.shape[1])
        return self.of((activations, _shape_alone(self.gradients, 1, outputs, self.gradients.shape[2])))

    def costs(self) -> tuple[float, float]:
        """Return the operations behind a Gram entry, and behind a row times a vector."""
        _, outputs, out = self.gradients.shape
        fan_in = self.activations.shape[1]
        return 2.0 * out + 2.0 * fan_in / outputs**2 + 2.0, 2.0 * out * (fan_in / outputs + 1.0)


def normal_cost(factors: Sequence[Factors]) -> float:
    """Return the floating-point operations that one example adds to the normal matrix."""
    total = 0.0
    for i, left in enumerate(factors):
        for j, right in enumerate(factors[: i + 1]):
            (_, outputs, q), s = left.gradients.shape, right.gradients.shape[2]
            r, t = (1 if f.activations is None else f.activations.shape[1] for f in (left, right))
            total += 2.0 * outputs * q * s + (0.0 if r == t == 1 else 2.0 * q * s * r * t / (4.0 if i == j else 1.0))
    return total
