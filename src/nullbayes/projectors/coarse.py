r"""The coarse space: leading directions of the rows, taken out before the blocks are swept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.rows import Rows

_PASSES = 2  # over the rows, after the first; the range finder's power iterations
_SPARE = 10  # random vectors more than directions


@dataclass(frozen=True)
class Coarse:
    """An orthonormal basis of directions in the row space."""

    basis: Tensor  # (r, P)

    def removed(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return the part of each vector inside the space."""
        return (vectors @ self.basis.T) @ self.basis


def coarse_space(rows: Rows, dimension: int) -> Coarse:
    r"""Find leading directions of the rows, each scaled to unit length, by a randomized range finder.

    Products :math:`\tilde A^\top \tilde A` with random vectors, orthonormalized between passes: the basis lies in the
    row space, so that what it removes never touches the kernel.
    """
    size = min(dimension, rows.n_rows, rows.n_columns)
    generator = torch.Generator(device="cpu").manual_seed(0x636F61)
    start = torch.randn(min(size + _SPARE, rows.n_columns), rows.n_columns, generator=generator, device="cpu")
    basis = start.to(rows.device, rows.dtype)
    lengths = rows.lengths().to(rows.dtype)
    weights = torch.where(lengths > 0, lengths.clamp_min(torch.finfo(rows.dtype).tiny) ** -2, 0.0)
    for _ in range(1 + _PASSES):
        image = torch.zeros_like(basis)
        for where, block in rows.blocks(rows.walk_rows):
            image += block.rmv(block.mv(basis) * weights[where])
        basis = torch.linalg.qr(image.T)[0].T
    inner = torch.zeros(len(basis), len(basis), dtype=torch.float64, device=rows.device)
    for where, block in rows.blocks(rows.walk_rows):
        part = block.mv(basis).double()
        inner += (part * weights[where]) @ part.T
    leading = torch.linalg.eigh(inner)[1][:, -size:].to(rows.dtype)
    return Coarse((leading.T @ basis).contiguous())
