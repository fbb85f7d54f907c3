r"""Products of float32 matrices by products of halves, which devices with tensor cores compute fastest.

A number is split into two of 11 bits, :math:`x = h + l`, and products are summed as :math:`l h' + h l' + h h'`, which
keeps 22 bits of them. Tensor cores add in float32 and round towards zero, so that a sum becomes too small by a part
that grows with its length. The small terms therefore come first, and after :data:`LONGEST` of the large ones the sum
goes on by an addition that rounds to nearest.

Halves reach from 6e-8 to 65,504: what is split has to be scaled before, to numbers of up to about a thousand.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 4096  # terms of a sum that are not rounded to nearest
_ALIGNED = 8  # halves: products are two to three times as fast where both sides of a matrix are multiples of 16 bytes


def aligned(size: int) -> int:
    """Return a number of columns, rounded up such that the rows of a matrix of halves are aligned."""
    return -(-size // _ALIGNED) * _ALIGNED


def split(matrix: Tensor, *, right: bool = False) -> Tensor:  # (n, c) -> (2, n, aligned(c))
    """Split a float32 matrix into low and high halves, for :func:`add_product`; as its right operand, high and low."""
    n, c = matrix.shape
    both = torch.empty(2, n, aligned(c), dtype=torch.float16, device=matrix.device)
    both[:, :, c:] = 0
    low, high = both[int(right), :, :c], both[1 - int(right), :, :c]
    high.copy_(matrix)
    torch.sub(matrix, high, out=low)
    return both


def add_product(
    result: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0
) -> None:  # (c, d), (2, n, c), (2, n, d)
    """Add ``alpha * left.T @ right`` of split matrices to a float32 matrix, in its place."""
    _add(result, left.flatten(0, 1).T, right.flatten(0, 1), alpha)
    for start in range(0, left.shape[1], LONGEST):
        part = slice(start, start + LONGEST)
        _add(result, left[1, part].T, right[0, part], alpha)


def _add(result: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:  # (c, d), (c, n), (n, d)
    if result.device.type == "cuda":
        torch.addmm(result, left, right, out_dtype=torch.float32, alpha=alpha, out=result)
    else:
        result.addmm_(left.float(), right.float(), alpha=alpha)


def add_cross(result: Tensor, left: Tensor, right: Tensor) -> None:  # (n, m), (n, c), (m, c)
    """Add ``left @ right.T`` of halves to a float32 matrix, in its place."""
    _add(result, left, right.T, 1.0)
