r"""The Gram matrix of rows in float32, from entries that are held, or computed, as halves.

Entries of eleven bits are enough for the factor of a preconditioner, take half the memory, and are multiplied fastest
where there are tensor cores. Halves reach from 6e-8 to 65,504, so each row is scaled by a power of two, one for all
pieces: no entry is then larger than :data:`_LARGEST`, and those down to 1e-7 of it keep their bits. One scale for all
pieces also lets a tile of the matrix be summed in its place: pieces with few columns are multiplied together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from nullbayes.limits import compact_tile_rows
from nullbayes.linalg.compact import SumPiece
from nullbayes.linalg.halves import add_cross, aligned
from nullbayes.linalg.pieces import DensePiece, Piece

_LARGEST = 256.0
_WIDE = 2048  # columns that are multiplied together, at least: with fewer, reading and writing the tile takes longer
_SMALLEST = 1e-30  # rows that are shorter count as zero: their squares have no digits in float32


def has_halves(pieces: Sequence[Piece]) -> bool:
    """Return whether some entries are held as halves, or computed whenever they are needed."""
    return any(piece.compact or (isinstance(piece, DensePiece) and piece.scale is not None) for piece in pieces)


def gram_by_halves(pieces: Sequence[Piece], n_rows: int, rows_per_example: int, working_bytes: int) -> Tensor:
    """Return ``B @ B.T`` of rows in pieces, one tile at a time, in float32.

    Pieces that are neither entries nor sums over positions add their own products.
    """
    halved = [piece for piece in pieces if isinstance(piece, (SumPiece, DensePiece))]
    rest = [piece for piece in pieces if not isinstance(piece, (SumPiece, DensePiece))]
    device = pieces[0].tensors()[0].device
    bounds = torch.stack([_bounds(piece) for piece in halved] or [torch.zeros(n_rows, device=device)])
    scale = _power_of_two(bounds.amax(0)).reciprocal().mul_(_LARGEST)  # (m,)
    result = torch.zeros(n_rows, n_rows, dtype=torch.float32, device=device)
    most = min(compact_tile_rows(n_rows, device, working_bytes), working_bytes // (8 * _input_numbers(halved)))
    step = _tile_size(most, rows_per_example)
    for i in range(0, n_rows, step):
        rows = slice(i, min(n_rows, i + step))
        for j in range(0, i + 1, step):
            columns = slice(j, min(n_rows, j + step))
            tile = result[rows, columns]
            left, right = (_all_halves(halved, part, scale, working_bytes, sum(tile.shape)) for part in (rows, columns))
            for mine, theirs in ((part, part) for part in left) if i == j else zip(left, right, strict=True):
                add_cross(tile, mine, theirs)
            tile.div_(scale[rows, None]).div_(scale[columns])
            for piece in rest:
                own = piece.take(rows)
                tile += own.cross(own if i == j else piece.take(columns), torch.float32, working_bytes)
            if i != j:
                result[columns, rows] = tile.T
    return result


def _tile_size(most: int, rows_per_example: int) -> int:
    """Return at most so many rows, of whole examples, and of a number that is multiplied fast, if there is room."""
    fast = math.lcm(rows_per_example, aligned(1))
    unit = fast if fast <= most else rows_per_example
    return max(1, most // unit) * unit


def _input_numbers(pieces: Sequence[Piece]) -> int:
    """Return how many inputs of a layer there are per row, where they are most: a tile holds two copies of them."""
    shares = (p.inputs[:1].numel() / p.gradients.shape[1] for p in pieces if isinstance(p, SumPiece) and len(p.inputs))
    return max(1, round(max(shares, default=1.0)))


def _power_of_two(numbers: Tensor) -> Tensor:
    """Return the least power of two above each number; 1 for what is about zero, or not finite."""
    fine = torch.isfinite(numbers) & (numbers > _SMALLEST)
    return torch.where(fine, torch.exp2(torch.frexp(numbers)[1].float()), 1.0)


def _bounds(piece: Piece) -> Tensor:  # (m,)
    """Return what no entry of each row is larger than."""
    if isinstance(piece, DensePiece):
        largest = _largest(piece.matrix, 1).float()
        return largest if piece.scale is None else largest * piece.scale[:, 0]
    summed = cast("SumPiece", piece)
    gradients = _largest(summed.gradients, 2).sum(2)  # (n, O)
    inputs = _sizes(summed)
    bounds = torch.where(inputs > _SMALLEST, _power_of_two(inputs), 0.0)[:, None] * gradients
    return (bounds if summed.bias is None else bounds.maximum(gradients)).flatten()


def _largest(numbers: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the largest absolute value along dimensions, without a copy of all of them."""
    return torch.maximum(numbers.amax(dim), -numbers.amin(dim))


def _sizes(piece: SumPiece) -> Tensor:  # (n,)
    return _largest(piece.inputs, (1, 2))


def _all_halves(
    pieces: Sequence[Piece], rows: slice, scale: Tensor, working_bytes: int, n_rows: int
) -> Iterator[Tensor]:  # (m, c)
    """Iterate over the entries of some rows, scaled, some columns at a time; ``n_rows`` rows are held together."""
    most = max(1, working_bytes // (8 * n_rows))  # columns, of halves and their padded copies
    waiting: list[Tensor] = []
    for piece in pieces:
        for part in _halves(piece.take(rows), scale[rows], most):
            waiting.append(part)
            if sum(other.shape[1] for other in waiting) >= min(most, _WIDE):
                yield _joined(waiting)
                waiting = []
    if waiting:
        yield _joined(waiting)


def _halves(piece: Piece, scale: Tensor, most: int) -> Iterator[Tensor]:  # (m, c)
    """Iterate over the entries of a piece, scaled, at most ``most`` columns at a time."""
    if isinstance(piece, DensePiece):
        if piece.scale is not None:  # halves already, of which no row becomes larger: exact, but for the least of them
            scale = (scale * piece.scale[:, 0]).clamp_max_(1.0).half()
        for part in piece.matrix.split(most, dim=1):
            yield (part * scale[:, None]).half()
        return
    summed = cast("SumPiece", piece)
    n, outputs, out, positions = summed.gradients.shape
    fan_in, sizes = summed.inputs.shape[2], _sizes(summed)
    size = _power_of_two(sizes)
    inputs = (summed.inputs / size[:, None, None]).half()
    largest = 1.0 / torch.finfo(scale.dtype).tiny  # finite, however small the gradients of large inputs are
    weights = torch.where(sizes > _SMALLEST, size, 0.0)[:, None] * scale.view(n, outputs)
    weights = weights.clamp_max_(largest)[:, :, None, None]
    step = max(1, most // max(fan_in, 2 * positions))  # gradients are as many as positions, widened before
    for start in range(0, out, step):
        gradients = (summed.gradients[:, :, start : start + step] * weights).half()
        width = gradients.shape[2]
        if summed.weight is not None:
            entries = torch.bmm(gradients.view(n, outputs * width, positions), inputs)
            yield entries.view(n * outputs, width * fan_in)
        if summed.bias is not None:
            entries = (summed.gradients[:, :, start : start + width].sum(3) * scale.view(n, outputs, 1)).half()
            yield entries.view(n * outputs, width)


def _joined(parts: list[Tensor]) -> Tensor:  # (m, c) -> (m, aligned)
    """Return the columns of all parts side by side, with zeros up to a number of columns that is multiplied fast."""
    n_columns = sum(part.shape[1] for part in parts)
    missing = aligned(n_columns) - n_columns
    if missing:
        parts = [*parts, parts[0].new_zeros(len(parts[0]), missing)]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]
