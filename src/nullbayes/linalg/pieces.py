r"""Pieces of rows: entries for some columns, outer products for others.

The row of a linear layer that is applied once per example is an outer product :math:`g_{no} a_n^\top` of an output
gradient and an activation. Its two factors take :math:`\text{in} + O \cdot \text{out}` numbers per example instead of
:math:`O \cdot \text{in} \cdot \text{out}`, products with it cost a factor :math:`O` less, and its Gram matrix is the
entrywise product of two small ones. A piece knows no network: it is algebra on a range of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from nullbayes.limits import PieceCosts
from nullbayes.precision import tensor_float32

_FEW_EXAMPLES = 4  # up to which a batched product is faster than one large product of a copy


class Factors(NamedTuple):
    """Rows ``n * O + o`` over some columns as ``gradients[n, o] ⊗ activations[n]``; None stands for a single one."""

    gradients: Tensor  # (n, O, q)
    activations: Tensor | None  # (n, r)
    column: int  # the first of q * r


@dataclass(frozen=True)
class Piece(ABC):
    """The rows, restricted to some columns."""

    holds: ClassVar[tuple[str, ...]]  # the fields that are tensors, of which the last may be None
    compact = False  # whether products compute entries from what is held, and need memory for them

    @property
    def rows_each(self) -> int:
        """Rows per entry of the leading dimension of the tensors; a piece is cut at multiples of it.

        They are those of an example, which the last tensor (n, O, ...) has in its second dimension.
        """
        return self.tensors()[-1].shape[1]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the piece holds."""
        return tuple(tensor for name in self.holds if (tensor := getattr(self, name)) is not None)

    def of(self, tensors: tuple[Tensor, ...]) -> Self:
        """Return a piece of the same kind and columns that holds other tensors."""
        return replace(self, **dict(zip(self.holds, tensors, strict=False)))

    @abstractmethod
    def add_mv(self, vectors: Tensor, result: Tensor) -> None:  # (S, P), (S, m)
        """Add this piece's share of ``vectors @ B.T`` to ``result``."""

    @abstractmethod
    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:  # (S, m), (S, P)
        """Add this piece's share of ``vectors @ B`` to its columns of ``result``."""

    @abstractmethod
    def put_dense(self, result: Tensor) -> None:  # (m, P)
        """Write this piece's entries into ``result``."""

    @abstractmethod
    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:  # (m, m')
        """Return this piece's rows times those of another of the same kind and columns: a tile of a Gram matrix."""

    @abstractmethod
    def factors(self, rows_per_example: int) -> list[Factors]:
        """Return the piece as products of gradients and activations, with ``rows_per_example`` rows per example."""

    def add_squares(self, rows_per_example: int, result: Tensor) -> None:  # (m,)
        """Add the squares of the entries of each row to ``result``, in float64."""
        add_squares(self.factors(rows_per_example), result)

    def outline(self, outputs: int) -> Self:
        """Return the piece of one example with ``outputs`` rows, as shapes without entries, to compute costs with."""
        *others, last = self.tensors()
        shapes = [shape_alone(other, 1, *other.shape[1:]) for other in others]
        return self.of((*shapes, shape_alone(last, 1, outputs, *last.shape[2:])))

    @abstractmethod
    def costs(self) -> PieceCosts:
        """Return what holding and multiplying the piece costs."""

    @property
    def product_bytes(self) -> tuple[float, float]:
        """Temporary bytes per row of a product: whatever it is multiplied with, and per vector."""
        return 0.0, 0.0

    def take(self, rows: slice) -> Piece:
        """Return a view of some rows."""
        part = slice(rows.start // self.rows_each, rows.stop // self.rows_each)
        return self.of(tuple(tensor[part] for tensor in self.tensors()))

    def allocate(self, n_rows: int, device: torch.device) -> Piece:
        """Return an unfilled piece of the same kind; pinned, if a GPU will read it from the host."""

        def empty(like: Tensor) -> Tensor:
            pinned = like.device.type == "cuda" and device.type == "cpu"
            size = (n_rows // self.rows_each, *like.shape[1:])
            return torch.empty(size, dtype=like.dtype, device=device, pin_memory=pinned)

        return self.of(tuple(empty(tensor) for tensor in self.tensors()))

    def fill(self, other: Piece) -> None:
        """Copy the rows of another piece of the same kind and size into this one, which may have more positions."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            if mine.shape != theirs.shape:
                mine.zero_()
            mine[tuple(map(slice, theirs.shape))].copy_(theirs)

    def widened(self, other: Piece) -> Piece:
        """Return this piece with room for rows like those of another, which may have more positions."""
        made = []
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            shape = [len(mine), *map(max, mine.shape[1:], theirs.shape[1:])]
            wide = mine if list(mine.shape) == shape else mine.new_zeros(shape)
            if wide is not mine:
                wide[tuple(map(slice, mine.shape))] = mine
            made.append(wide)
        return self.of(tuple(made))

    def to(self, device: torch.device) -> Piece:
        """Return the piece on a device; itself if it is there."""
        return self.of(tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors()))

    def halved(self) -> Piece:
        """Return the piece in half the memory with at least ten bits per number, if it is large enough to matter."""
        return self

    def _held_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


@dataclass(frozen=True)
class DensePiece(Piece):
    """Entries of consecutive columns; with a ``scale``, float16 entries that are widened in products."""

    matrix: Tensor  # (m, c)
    column: int  # the first
    scale: Tensor | None = None  # (m, 1) float32, powers of two

    holds = ("matrix", "scale")

    @property
    def rows_each(self) -> int:
        """One."""
        return 1

    @property
    def _columns(self) -> slice:
        return slice(self.column, self.column + self.matrix.shape[1])

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Multiply with the entries."""
        entries, vectors = self.matrix.to(vectors.dtype), vectors[:, self._columns]
        if self.scale is not None:
            result += (vectors @ entries.T) * self.scale[:, 0]
        elif len(entries) < len(vectors):  # the narrow matrix goes first: the other order takes half as long again
            result += (entries @ vectors.T).T
        else:
            result.addmm_(vectors, entries.T)

    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Multiply with the transposed entries."""
        scaled = vectors if self.scale is None else vectors * self.scale[:, 0]
        result[:, self._columns].addmm_(scaled, self.matrix.to(vectors.dtype))

    def put_dense(self, result: Tensor) -> None:
        """Write the entries."""
        result[:, self._columns] = self.matrix
        if self.scale is not None:
            result[:, self._columns] *= self.scale

    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:
        """Return ``B @ other.T``."""
        if self.scale is None or other.scale is None:
            return cross_product(self.matrix, other.matrix, dtype, working_bytes)
        with tensor_float32():  # their ten bits pass through unchanged
            tile = cross_product(self.matrix, other.matrix, dtype, working_bytes)
        return tile.mul_(self.scale).mul_(other.scale.T)

    def factors(self, rows_per_example: int) -> list[Factors]:
        """Return the entries of each example."""
        entries = self.matrix if self.scale is None else self.matrix.float() * self.scale
        return [Factors(entries.view(-1, rows_per_example, entries.shape[1]), None, self.column)]

    def outline(self, outputs: int) -> Self:
        """Return ``outputs`` rows of the same columns."""
        return self.of(tuple(shape_alone(tensor, outputs, tensor.shape[1]) for tensor in self.tensors()))

    def halved(self) -> DensePiece:
        """Return the entries in float16, each row scaled by a power of two."""
        if self.scale is not None:
            return self
        if self.matrix.is_meta:  # an outline, for which torch would trace every operation in Python
            scale = torch.empty(len(self.matrix), 1, dtype=torch.float32, device="meta")
            return DensePiece(self.matrix.half(), self.column, scale)
        largest = self.matrix.abs().amax(1, keepdim=True).float()
        scale = torch.exp2(torch.frexp(largest)[1].float() - 8.0)  # entries up to 256: small ones keep their bits
        return DensePiece((self.matrix / scale).half(), self.column, torch.where(largest > 0, scale, 1.0))

    @property
    def product_bytes(self) -> tuple[float, float]:
        """The widened entries of a scaled piece."""
        return (0.0, 0.0) if self.scale is None else (4.0 * self.matrix.shape[1], 8.0)

    def costs(self) -> PieceCosts:
        """Return two operations per column."""
        flops = 2.0 * self.matrix.shape[1]
        return PieceCosts(self._held_bytes(), flops, flops, *self.product_bytes)


@dataclass(frozen=True)
class OuterPiece(Piece):
    """Rows ``n * O + o`` that are outer products of ``gradients[n, o]`` and ``activations[n]``, weight and bias."""

    activations: Tensor  # (n, in)
    gradients: Tensor  # (n, O, out)
    weight: int | None  # first column of the (out, in) weight
    bias: int | None  # first column of the (out,) bias

    holds = ("activations", "gradients")

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Push the activations through each sample's layer, then along the gradients."""
        n, _, out = self.gradients.shape
        fan_in, samples = self.activations.shape[1], len(vectors)
        if self.weight is not None:
            weights = vectors[:, self.weight : self.weight + out * fan_in]
            if n <= _FEW_EXAMPLES:  # the copy below would take longer than the product
                each, seen = weights.unflatten(1, (out, fan_in)), self.activations.expand(samples, n, fan_in)
                if n == 1:  # the weights first: the other order takes up to twice as long
                    layer = torch.bmm(each, seen.mT).permute(2, 0, 1)
                else:
                    layer = torch.bmm(seen, each.mT).transpose(0, 1)
            else:
                layer = (self.activations @ weights.reshape(samples * out, fan_in).T).view(n, samples, out)
            del weights
        else:
            layer = vectors.new_zeros(n, samples, out)
        if self.bias is not None:
            layer += vectors[:, self.bias : self.bias + out]
        result += (layer @ self.gradients.mT).transpose(0, 1).reshape(samples, -1)

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
        similar = cross_product(self.gradients.reshape(-1, out), other.gradients.reshape(-1, out), dtype, working_bytes)
        inner = similar.new_zeros(1, 1).expand(n, m)
        if self.weight is not None:
            inner = cross_product(self.activations, other.activations, dtype, working_bytes)
        if self.bias is not None:
            inner = inner + 1.0
        return similar.view(n, outputs, m, outputs).mul_(inner[:, None, :, None]).view(n * outputs, m * outputs)

    def factors(self, rows_per_example: int) -> list[Factors]:
        """Return the factors of the weight, and the gradients for the bias."""
        weight = [] if self.weight is None else [Factors(self.gradients, self.activations, self.weight)]
        return weight + ([] if self.bias is None else [Factors(self.gradients, None, self.bias)])

    @property
    def product_bytes(self) -> tuple[float, float]:
        """What lies between the two products."""
        _, outputs, out = self.gradients.shape
        return 0.0, self.gradients.element_size() * (out / outputs + 2.0)

    def costs(self) -> PieceCosts:
        """Return the operations on the factors."""
        _, outputs, out = self.gradients.shape
        fan_in = self.activations.shape[1]
        gram, product = 2.0 * out + 2.0 * fan_in / outputs**2 + 2.0, 2.0 * out * (fan_in / outputs + 1.0)
        return PieceCosts(self._held_bytes(), gram, product, *self.product_bytes)


def add_squares(factors: Sequence[Factors], result: Tensor) -> None:  # (n * O,)
    """Add the squares of the entries of each row to ``result``, in float64."""
    for gradients, activations, _ in factors:
        share = gradients.double().square().sum(2)
        if activations is not None:
            share *= activations.double().square().sum(1, keepdim=True)
        result += share.flatten()


def normal_flops(factors: Sequence[Factors]) -> float:
    """Return the floating-point operations that one example adds to the normal matrix."""
    sizes = [(*f.gradients.shape[1:], 1 if f.activations is None else f.activations.shape[1]) for f in factors]
    total = 0.0
    for i, (outputs, q, r) in enumerate(sizes):
        for j, (_, s, t) in enumerate(sizes[: i + 1]):
            total += 2.0 * outputs * q * s + (0.0 if r == t == 1 else 2.0 * q * s * r * t / (4.0 if i == j else 1.0))
    return total


def shape_alone(like: Tensor, *shape: int) -> Tensor:
    """Return a tensor of a shape, without entries."""
    return torch.empty(shape, dtype=like.dtype, device="meta")


def cross_product(left: Tensor, right: Tensor, dtype: torch.dtype, working_bytes: int) -> Tensor:  # (m, m')
    """Return ``left @ right.T`` in a precision, widening some columns at a time where that takes a copy."""
    if left.dtype == dtype:
        return left @ right.T
    step = max(1, working_bytes // (2 * dtype.itemsize * (len(left) + len(right))))
    chunks = zip(left.split(step, dim=1), right.split(step, dim=1), strict=True)
    total = torch.zeros(len(left), len(right), dtype=dtype, device=left.device)
    for a, b in chunks:
        total.addmm_(a.to(dtype), b.to(dtype).T)
    return total
