r"""Curvature of low rank, :math:`C = \sum_i \lambda_i u_i u_i^\top`, and two ways to find its eigenpairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.curvature.base import Curvature, padded
from nullbayes.linalg.lanczos import block_width, krylov_basis
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import eigh, right_singular
from nullbayes.precision import full_precision


class LowRank(Curvature):
    r"""Orthonormal vectors with an eigenvalue each; the curvature is zero outside their span.

    A sample is :math:`\alpha^{-1/2}\,(\varepsilon - U\,(1 - \sqrt{\alpha/(\lambda + \alpha)})\,U^\top\varepsilon)`.

    Parameters
    ----------
    basis : Tensor (k, P)
        The vectors, as rows.
    values : Tensor (k,)
        Their eigenvalues.
    """

    def __init__(self, basis: Tensor, values: Tensor) -> None:
        if values.shape != basis.shape[:1]:
            msg = f"Vectors of shape {tuple(basis.shape)} need a value each, not values of shape {tuple(values.shape)}."
            raise SettingsError(msg)
        self.basis, self.values = basis, values.to(basis)
        self.rank, self.n_columns = basis.shape

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Scale the noise down along each vector."""
        shrunk = 1.0 - (alpha / (self.values + alpha)).sqrt()
        return (noise - (noise @ self.basis.T * shrunk) @ self.basis) / math.sqrt(alpha)

    def solve(self, vectors: Tensor, alpha: float) -> Tensor:  # (S, P) -> (S, P)
        r"""Apply :math:`(C + \alpha I)^{-1}` as its root twice, which rounding cannot make indefinite."""
        return self.sample(self.sample(vectors, alpha), alpha)

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Return the squared length of each row after scaling it as noise is scaled, without cancellation."""
        return self.sample(rows, alpha).square().sum(1)

    def outside(self, rows: Tensor) -> Tensor:  # (m, P) -> (m,)
        """Return the squared length of the part of each row outside the span of the vectors."""
        return (rows - (rows @ self.basis.T) @ self.basis).square().sum(1)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the values, and zero for the remaining columns."""
        return padded(self.values, self.n_columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the vectors and their values."""
        return {"basis": self.basis, "values": self.values}


@full_precision()
def lanczos_pairs(rows: Rows, rank: int, generator: torch.Generator) -> LowRank:
    r"""Return the Ritz pairs of :math:`A^\top A` on a Krylov space, which finds the largest eigenvalues first."""
    basis = krylov_basis(rows, min(rank, rows.n_rows, rows.n_columns), generator)
    projected = torch.zeros(len(basis), len(basis), dtype=torch.float64, device=rows.device)
    width = block_width(rows, rank)  # at a time: products without rows take memory for each vector
    for _, block in rows.blocks(rows.rows_per_pass):
        image = torch.cat([block.mv(part) for part in basis.split(width)]).double()
        projected += image @ image.T
    values, turn = eigh(projected)
    return LowRank(turn.T.flip(0).to(basis) @ basis, values.flip(0).clamp_min(0.0))


@full_precision()
def nystrom_pairs(rows: Rows, rank: int, generator: torch.Generator) -> LowRank:
    r"""Return eigenpairs of :math:`A^\top A` from its product with random vectors, in one pass over the rows.

    The Nyström approximation :math:`Y (\Omega^\top Y)^{-1} Y^\top`, :math:`Y = A^\top A\,\Omega` (Tropp, Yurtsever,
    Udell and Cevher 2017), which never exceeds the matrix itself. A small shift is added and subtracted again.
    """
    size = min(rank, rows.n_columns)
    drawn = torch.randn(size, rows.n_columns, generator=generator, dtype=rows.dtype, device=generator.device)
    test = torch.linalg.qr(drawn.to(rows.device).T).Q.T
    image = torch.zeros_like(test)  # Y, transposed
    for _, block in rows.blocks(rows.rows_per_pass):
        image += block.rmv(block.mv(test))
    shift = torch.finfo(rows.dtype).eps * float(image.norm()) + torch.finfo(rows.dtype).tiny
    image += shift * test
    inner = test.double() @ image.double().T
    values, turn = eigh(0.5 * (inner + inner.T))
    root = turn * values.clamp_min(shift).rsqrt()  # of the inverse
    lengths, basis = right_singular(root.T @ image.double())
    found = (lengths.square() - shift).clamp_min(0.0)
    keep = found > shift
    return LowRank(basis[keep].to(rows.dtype), found[keep])
