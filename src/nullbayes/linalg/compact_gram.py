r"""The Gram matrix of compact pieces in float32, from entries that are computed as halves.

Entries of eleven bits are enough for the factor of a preconditioner, take half the memory, and are multiplied fastest
where there are tensor cores. Halves reach from 6e-8 to 65,504, so each row is scaled by a power of two, one for all
pieces: no entry is then larger than :data:`_LARGEST`, and those down to 1e-7 of it keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from nullbayes.limits import compact_tile_rows
from nullbayes.linalg.compact import SumPiece
from nullbayes.linalg.halves import add_cross, aligned
from nullbayes.linalg.pieces import DensePiece, Piece

_LARGEST = 256.0
_SMALLEST = 1e-30  # rows that are shorter count as zero: their squares have no digits in float32


def compact_gram(pieces: Sequence[Piece], n_rows: int, rows_per_example: int, working_bytes: int) -> Tensor:
    """Return ``B @ B.T`` of rows in pieces, one tile at a time, in float32.

    Pieces that are neither entries nor sums over positions add their own products.
    """
    halved, rest = [piece for piece in pieces if _has_halves(piece)], [p for p in pieces if not _has_halves(p)]
    device = pieces[0].tensors()[0].device
    bounds = torch.stack([_bounds(piece) for piece in halved] or [torch.zeros(n_rows, device=device)])
    scale = _power_of_two(bounds.amax(0)).reciprocal().mul_(_LARGEST)  # (m,)
    result = torch.zeros(n_rows, n_rows, dtype=torch.float32, device=device)
    most = min(compact_tile_rows(n_rows, device, working_bytes), working_bytes // (8 * _input_numbers(halved)))
    step = max(1, most // rows_per_example) * rows_per_example
    for i in range(0, n_rows, step):
        rows = slice(i, min(n_rows, i + step))
        for j in range(0, i + 1, step):
            columns = slice(j, min(n_rows, j + step))
            tile = result[rows, columns]
            for piece in halved:
                _add_tile(tile, piece, rows, columns, scale, working_bytes)
            tile.div_(scale[rows, None]).div_(scale[columns])
            for piece in rest:
                mine = piece.take(rows)
                tile += mine.cross(mine if i == j else piece.take(columns), torch.float32, working_bytes)
            if i != j:
                result[columns, rows] = tile.T
    return result


def _has_halves(piece: Piece) -> bool:
    return isinstance(piece, SumPiece) or (isinstance(piece, DensePiece) and piece.scale is None)


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
        return _largest(piece.matrix, 1)
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


def _add_tile(
    tile: Tensor, piece: Piece, rows: slice, columns: slice, scale: Tensor, working_bytes: int
) -> None:  # (m, m')
    """Add the products of some rows of a piece with some others, scaled."""
    left = _halves(piece.take(rows), scale[rows], working_bytes, sum(tile.shape))
    if rows == columns:
        for mine in left:
            add_cross(tile, mine, mine)
        return
    right = _halves(piece.take(columns), scale[columns], working_bytes, sum(tile.shape))
    for mine, theirs in zip(left, right, strict=True):
        add_cross(tile, mine, theirs)


def _halves(piece: Piece, scale: Tensor, working_bytes: int, n_rows: int) -> Iterator[Tensor]:  # (m, c)
    """Iterate over the entries of some columns at a time, scaled, where ``n_rows`` rows are held together."""
    most = max(1, working_bytes // (8 * n_rows))  # columns, of halves and their padded copies
    if isinstance(piece, DensePiece):
        for part in piece.matrix.split(most, dim=1):
            yield _aligned((part * scale[:, None]).half())
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
            yield _aligned(entries.view(n * outputs, width * fan_in))
        if summed.bias is not None:
            entries = (summed.gradients[:, :, start : start + width].sum(3) * scale.view(n, outputs, 1)).half()
            yield _aligned(entries.view(n * outputs, width))


def _aligned(entries: Tensor) -> Tensor:  # (m, c) -> (m, aligned(c))
    missing = aligned(entries.shape[1]) - entries.shape[1]
    return torch.cat([entries, entries.new_zeros(len(entries), missing)], 1) if missing else entries
