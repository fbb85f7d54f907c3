"""Rows held as pieces, in every mixture and order of columns, with the matrix that they stand for written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nullbayes.linalg.compact import SumPiece, TablePiece
from nullbayes.linalg.held import HeldRows
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece
from support.drawing import randint, randn, randperm


class Layer(NamedTuple):
    """A linear layer: outer products for its weight, gradients for its bias."""

    fan_in: int
    out: int
    weight: bool = True
    bias: bool = True


class Positions(NamedTuple):
    """A linear layer at several positions: sums of outer products for its weight, of gradients for its bias."""

    fan_in: int
    out: int
    positions: int
    weight: bool = True
    bias: bool = True


class Table(NamedTuple):
    """An embedding: gradients in the lines of some tokens, which may repeat."""

    lines: int
    width: int
    positions: int


class Entries(NamedTuple):
    """Columns whose entries are held, whole or in half precision."""

    columns: int
    half: bool = False


class Gap(NamedTuple):
    """Columns that no piece has."""

    columns: int


MIXTURES: dict[str, list[Layer | Positions | Table | Entries | Gap]] = {
    "weight and bias": [Layer(4, 5)],
    "weight": [Layer(4, 5, bias=False)],
    "bias": [Layer(4, 5, weight=False)],
    "one input": [Layer(1, 5)],
    "one unit": [Layer(4, 1)],
    "one of each": [Layer(1, 1)],
    "entries": [Entries(6)],
    "one column": [Entries(1)],
    "half": [Entries(6, half=True)],
    "two layers": [Layer(4, 5), Layer(5, 3)],
    "layer and entries": [Layer(4, 5), Entries(6)],
    "bias and entries": [Layer(4, 5, weight=False), Entries(6)],
    "layers of one input and one unit": [Layer(1, 3), Layer(3, 1), Layer(1, 1, bias=False)],
    "several positions": [Positions(4, 5, 2)],
    "weight at several positions": [Positions(4, 5, 3, bias=False)],
    "bias at several positions": [Positions(4, 5, 3, weight=False)],
    "table": [Table(6, 2, 4)],
    "table and layer": [Table(3, 1, 5), Positions(2, 3, 2), Layer(3, 2)],
    "with gaps": [Gap(2), Layer(3, 2), Gap(1), Entries(3), Gap(4)],
    "everything": [
        Layer(1, 4),
        Layer(3, 2, bias=False),
        Layer(2, 3, weight=False),
        Entries(5),
        Entries(4, half=True),
        Gap(3),
    ],
}


@dataclass(frozen=True)
class Layout:
    """Pieces and their matrix, in float64."""

    pieces: list[Piece]
    matrix: Tensor
    n: int
    outputs: int
    dtype: torch.dtype

    def rows(self) -> HeldRows:
        """The rows that the pieces make."""
        like = torch.empty(0, dtype=self.dtype)
        return HeldRows(
            self.pieces,
            n_rows=len(self.matrix),
            n_columns=self.matrix.shape[1],
            like=like,
            rows_per_example=self.outputs,
        )


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layout(kind: str, *, n: int = 7, outputs: int = 3, order: int = 0, dtype: torch.dtype = torch.float64) -> Layout:
    """Draw the pieces of a mixture; ``order`` permutes weights, biases, entries and gaps among the columns."""
    sizes: list[int] = []
    for part in MIXTURES[kind]:
        if isinstance(part, Table):
            sizes.append(part.lines * part.width)
        elif isinstance(part, (Layer, Positions)):
            sizes += [part.fan_in * part.out * part.weight, part.out * part.bias]
        else:
            sizes.append(part.columns)
    permuted = range(len(sizes)) if order == 0 else randperm(len(sizes), generator=torch.Generator().manual_seed(order))
    starts, total = [0] * len(sizes), 0
    for i in map(int, permuted):
        starts[i], total = total, total + sizes[i]
    matrix = torch.zeros(n * outputs, total, dtype=torch.float64)
    pieces: list[Piece] = []
    places = iter(starts)
    for seed, part in enumerate(MIXTURES[kind], start=10):
        if isinstance(part, Positions):
            weight, bias = next(places), next(places)
            inputs = gaussian(n, part.positions, part.fan_in, seed=seed, dtype=dtype)
            slopes = gaussian(n, outputs, part.out, part.positions, seed=seed + 100, dtype=dtype)
            pieces.append(SumPiece(inputs, slopes, weight if part.weight else None, bias if part.bias else None))
            if part.weight:
                products = torch.einsum("nojt,nti->noji", slopes.double(), inputs.double())
                matrix[:, weight : weight + part.out * part.fan_in] = products.reshape(n * outputs, -1)
            if part.bias:
                matrix[:, bias : bias + part.out] = slopes.double().sum(3).reshape(n * outputs, -1)
        elif isinstance(part, Table):
            start = next(places)
            generator = torch.Generator().manual_seed(seed)
            chosen = randint(part.lines, (n, part.positions), generator=generator)
            slopes = gaussian(n, outputs, part.positions, part.width, seed=seed + 100, dtype=dtype)
            pieces.append(TablePiece(chosen, slopes, part.lines, start))
            lines = torch.nn.functional.one_hot(chosen, part.lines).double()
            entries = torch.einsum("ntl,notw->nolw", lines, slopes.double())
            matrix[:, start : start + part.lines * part.width] = entries.reshape(n * outputs, -1)
        elif isinstance(part, Layer):
            weight, bias = next(places), next(places)
            activations = gaussian(n, part.fan_in, seed=seed, dtype=dtype)
            gradients = gaussian(n, outputs, part.out, seed=seed + 100, dtype=dtype)
            pieces.append(
                OuterPiece(activations, gradients, weight if part.weight else None, bias if part.bias else None)
            )
            if part.weight:
                products = torch.einsum("noj,ni->noji", gradients.double(), activations.double())
                matrix[:, weight : weight + part.out * part.fan_in] = products.reshape(n * outputs, -1)
            if part.bias:
                matrix[:, bias : bias + part.out] = gradients.double().reshape(n * outputs, -1)
        else:
            start = next(places)
            if isinstance(part, Entries):
                entries = gaussian(n * outputs, part.columns, seed=seed, dtype=dtype)
                if part.half:  # what ten bits hold exactly
                    entries = entries.half().to(dtype)
                piece: Piece = DensePiece(entries, start)
                pieces.append(piece.halved() if part.half else piece)
                matrix[:, start : start + part.columns] = entries.double()
    return Layout(pieces, matrix, n, outputs, dtype)
