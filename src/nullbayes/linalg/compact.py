r"""Pieces that hold what entries are computed from, where that takes far less memory than the entries.

The row of a layer that is applied at several positions is a sum of outer products,
:math:`\sum_t g_{no,t} a_{n,t}^\top`. For a sentence of T tokens, its factors are T (in + out) numbers instead of
in · out. The row of an embedding is zero but for the tokens of the sentence. Products compute some entries at a time
from the factors, without the network.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nullbayes.limits import PieceCosts
from nullbayes.linalg.pieces import DensePiece, Factors, Piece, cross_product
from nullbayes.precision import tensor_float32

_VECTORS = 30  # that the entries of a product are shared by, in estimates of its cost


def _preconditioning(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Allow products of ten bits for a Gram matrix in float32: its factor is a preconditioner."""
    return tensor_float32() if dtype == torch.float32 else nullcontext()


class CompactPiece(Piece):
    """Rows whose entries are computed from what is held; abstract: a subclass says how."""

    gradients: Tensor
    compact = True

    @abstractmethod
    def entries(self) -> Iterator[DensePiece]:
        """Compute the entries."""

    def put_dense(self, result: Tensor) -> None:
        """Write the entries."""
        for piece in self.entries():
            piece.put_dense(result)

    def factors(self, rows_per_example: int) -> list[Factors]:
        """Return the entries of each example, in float64."""
        wide = self.of(tuple(t.double() if t.is_floating_point() else t for t in self.tensors()))
        return [factors for piece in wide.entries() for factors in piece.factors(rows_per_example)]


@dataclass(frozen=True)
class SumPiece(CompactPiece):
    """Rows ``n * O + o`` that are sums over positions of ``gradients[n, o, :, t] ⊗ inputs[n, t]``, weight and bias."""

    inputs: Tensor  # (n, T, in)
    gradients: Tensor  # (n, O, out, T)
    weight: int | None = None  # first column of the (out, in) weight
    bias: int | None = None  # first column of the (out,) bias

    holds = ("inputs", "gradients")

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Compute the entries, and multiply with them."""
        for piece in self.entries():
            piece.add_mv(vectors, result)

    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Compute the entries, and multiply with their transpose."""
        for piece in self.entries():
            piece.add_rmv(vectors, result)

    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:
        """Return ``B @ other.T``, with as many columns of entries at a time as the working bytes hold."""
        (n, outputs, out, _), m = self.gradients.shape, len(other.gradients)
        left, right = (piece.of(tuple(t.to(dtype) for t in piece.tensors())) for piece in (self, other))
        each = self.inputs.shape[2] * outputs * (n + m) * dtype.itemsize
        step = max(1, working_bytes // max(1, each)) if self.weight is not None else out
        total = torch.zeros(n * outputs, m * outputs, dtype=dtype, device=self.inputs.device)
        for start in range(0, out, step):
            pairs = zip(left.entries(start, start + step), right.entries(start, start + step), strict=True)
            for mine, theirs in pairs:
                with _preconditioning(dtype):
                    total += cross_product(mine.matrix, theirs.matrix, dtype, working_bytes)
        return total

    @property
    def product_bytes(self) -> tuple[float, float]:
        """The entries, and the sum of the gradients."""
        return self.gradients.element_size() * self._columns, 0.0

    def costs(self) -> PieceCosts:
        """Return the operations to compute the entries, shared by some vectors, and to multiply with them."""
        entries = 2.0 * self._columns * self.inputs.shape[1]
        product = 2.0 * self._columns + entries / _VECTORS
        return PieceCosts(self._held_bytes(), 2.0 * self._columns, product, *self.product_bytes, entries)

    @property
    def _columns(self) -> int:
        out, fan_in = self.gradients.shape[2], self.inputs.shape[2]
        return (0 if self.weight is None else out * fan_in) + (0 if self.bias is None else out)

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[DensePiece]:
        """Iterate over the entries of weight and bias that belong to some of the outputs of the layer."""
        gradients, fan_in = self.gradients[:, :, start:stop], self.inputs.shape[2]
        n, outputs, width, positions = gradients.shape
        if self.weight is not None:  # all outputs of an example in one product: its inputs are read once
            product = torch.bmm(gradients.reshape(n, outputs * width, positions), self.inputs)
            yield DensePiece(product.view(n * outputs, width * fan_in), self.weight + start * fan_in)
        if self.bias is not None:
            yield DensePiece(gradients.sum(3).reshape(n * outputs, width), self.bias + start)


@dataclass(frozen=True)
class TablePiece(CompactPiece):
    """Rows ``n * O + o`` over a table with one line per token: ``gradients[n, o, t]`` in line ``chosen[n, t]``."""

    chosen: Tensor  # (n, T) integers
    gradients: Tensor  # (n, O, T, width)
    lines: int  # of the table
    weight: int = 0  # its first column

    holds = ("chosen", "gradients")

    @property
    def _columns(self) -> slice:
        return slice(self.weight, self.weight + self.lines * self.gradients.shape[3])

    def add_mv(self, vectors: Tensor, result: Tensor) -> None:
        """Look up the lines of the tokens in each vector, and multiply with their gradients."""
        n, outputs, positions, width = self.gradients.shape
        tables = vectors[:, self._columns].reshape(len(vectors), self.lines, width)
        found = tables[:, self.chosen.flatten()].view(len(vectors), n, positions * width).transpose(0, 1)
        changes = found @ self.gradients.reshape(n, outputs, positions * width).mT  # (n, S, O)
        result += changes.transpose(0, 1).reshape(len(vectors), -1)

    def add_rmv(self, vectors: Tensor, result: Tensor) -> None:
        """Add the gradients, weighted, to the lines of their tokens."""
        n, outputs, positions, width = self.gradients.shape
        weights = vectors.reshape(-1, n, outputs).transpose(0, 1)  # (n, S, O)
        added = (weights @ self.gradients.reshape(n, outputs, positions * width)).transpose(0, 1)  # (S, n, T width)
        tables = result[:, self._columns].unflatten(1, (self.lines, width))
        tables.index_add_(1, self.chosen.flatten(), added.reshape(len(vectors), n * positions, width))

    def entries(self) -> Iterator[DensePiece]:
        """Add the gradients to the lines of their tokens."""
        n, outputs, _, width = self.gradients.shape
        entries = self.gradients.new_zeros(n, outputs, self.lines, width)
        entries.scatter_add_(2, self.chosen[:, None, :, None].expand_as(self.gradients), self.gradients)
        yield DensePiece(entries.view(n * outputs, -1), self.weight)

    def cross(self, other: Self, dtype: torch.dtype, working_bytes: int) -> Tensor:
        """Return the products of gradients, summed over the pairs of positions that have the same token."""
        (n, outputs, positions, width), m = self.gradients.shape, len(other.gradients)
        total = torch.empty(n, outputs, m, outputs, dtype=dtype, device=self.gradients.device)
        theirs = other.gradients.reshape(-1, width).to(dtype)
        pairs = positions * other.gradients.shape[2]
        step = max(1, working_bytes // max(1, 2 * dtype.itemsize * outputs**2 * m * pairs))
        for start in range(0, n, step):
            mine, tokens = self.gradients[start : start + step], self.chosen[start : start + step]
            with _preconditioning(dtype):
                similar = mine.reshape(-1, width).to(dtype) @ theirs.T
            similar = similar.view(len(mine), outputs, positions, m, outputs, -1)
            same = tokens[:, :, None, None] == other.chosen  # (n, T, m, T')
            total[start : start + step] = similar.mul_(same[:, None, :, :, None, :]).sum(dim=(2, 5))
        return total.view(n * outputs, m * outputs)

    def add_squares(self, rows_per_example: int, result: Tensor) -> None:  # (m,)
        """Add the squares of the gradients, of the same token together."""
        gradients = self.gradients.double()
        same = self.chosen[:, None, :] == self.chosen[:, :, None]  # (n, T, T)
        result += (gradients @ gradients.mT).mul_(same[:, None]).sum(dim=(2, 3)).flatten()

    @property
    def product_bytes(self) -> tuple[float, float]:
        """The lines of the tokens, and a copy of them."""
        _, outputs, positions, width = self.gradients.shape
        return 0.0, 2.0 * self.gradients.element_size() * positions * width / outputs

    def costs(self) -> PieceCosts:
        """Return the operations on the gradients."""
        positions, width = self.gradients.shape[2:]
        flops = 2.0 * positions * width
        return PieceCosts(self._held_bytes(), flops * positions, flops, *self.product_bytes)
