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
    row space, so that what it removes never touches the kernel. Directions that rounding may have put there are left
    out: there are never more than the rank.
    """
    size = min(dimension, rows.n_rows, rows.n_columns)
    generator = torch.Generator(device="cpu").manual_seed(0x636F61)
    start = torch.randn(min(size + _SPARE, rows.n_columns), rows.n_columns, generator=generator, device="cpu")
    basis = start.to(rows.device, rows.dtype)
    scale = rows.unit_scale().to(rows.dtype)
    for _ in range(1 + _PASSES):
        image = torch.zeros_like(basis)
        for where, block in rows.blocks(rows.walk_rows):
            image += block.rmv(block.mv(basis) * scale[where] * scale[where])  # its square may overflow
        basis = torch.linalg.qr(image.T)[0].T
    inner = torch.zeros(len(basis), len(basis), dtype=torch.float64, device=rows.device)
    for where, block in rows.blocks(rows.walk_rows):
        part = block.mv(basis).double() * scale[where]
        inner += part @ part.T
    eigenvalues, leading = torch.linalg.eigh(inner)
    seen = eigenvalues > len(basis) * torch.finfo(rows.dtype).eps * eigenvalues[-1]
    leading = leading[:, seen][:, -size:].to(rows.dtype)
    return Coarse((leading.T @ basis).contiguous())
