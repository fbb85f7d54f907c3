r"""The one place that decides rank.

A Gram matrix :math:`G = B B^\top` squares the condition number of :math:`B`. Its rows are therefore *equilibrated*
first, :math:`D^{-1} G D^{-1}` with :math:`D` the row lengths: a kernel does not depend on the length of the rows,
and loss gradients of well-fitted examples are easily a million times shorter than the others. A row shorter than the
square root of the smallest normal number is taken for zero, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def relative_cutoff(size: int, dtype: torch.dtype) -> float:
    """Return the cut below which an eigenvalue, relative to the largest, is rounding: ``size * eps``."""
    return size * torch.finfo(dtype).eps


@dataclass(frozen=True, slots=True)
class GramFactor:
    r"""A factorization of a Gram matrix that applies :math:`G^+` or :math:`(G + \delta D^2)^{-1}`.

    Attributes
    ----------
    scale : Tensor (m,)
        One over the row lengths; zero for rows that are zero.
    triangle : Tensor (m, m) or None
        Lower Cholesky factor of the equilibrated matrix.
    basis, eigenvalues : Tensor (m, r), (r,) or None
        Its eigenvectors above the cut, when Cholesky would not do.
    rank : int or None
        Numerical rank; None for a shifted factor, which decides no rank.
    shift : float
        :math:`\delta`, zero for an exact factor.
    smallest : float
        A lower estimate of the smallest retained eigenvalue, relative to the largest.
    """

    scale: Tensor
    triangle: Tensor | None
    basis: Tensor | None
    eigenvalues: Tensor | None
    rank: int | None
    shift: float
    smallest: float

    def solve(self, vectors: Tensor) -> Tensor:  # (S, m) -> (S, m)
        """Apply the (pseudo-)inverse to each vector, in the factor's precision."""
        scaled = vectors.to(self.scale.dtype) * self.scale
        if self.triangle is not None:
            solved = torch.cholesky_solve(scaled.T, self.triangle).T
        else:
            assert self.basis is not None and self.eigenvalues is not None  # noqa: PT018 - one invariant
            solved = (scaled @ self.basis / self.eigenvalues) @ self.basis.T
        return (solved * self.scale).to(vectors.dtype)


def _equilibrate(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Scale ``gram`` in place to a unit diagonal (one where a row is zero); return it and the scales."""
    diagonal = gram.diagonal().clone()
    alive = diagonal > torch.finfo(gram.dtype).tiny
    scale = torch.where(alive, diagonal.clamp_min(torch.finfo(gram.dtype).tiny).rsqrt(), 0.0)
    gram.mul_(scale).mul_(scale[:, None])
    gram.diagonal().copy_(torch.ones_like(scale))
    return gram, scale


def factor_exact(gram: Tensor, *, cutoff: float | None = None) -> GramFactor:
    r"""Factor a Gram matrix for :math:`G^+`; ``gram`` is overwritten.

    Cholesky where the matrix is safely regular, else the eigenvectors above the cut. Singular values of the rows below
    :math:`\sqrt{\text{cutoff}}` times the largest count as zero: that is what squaring costs.

    Parameters
    ----------
    gram : Tensor (m, m)
        Symmetric, positive semi-definite.
    cutoff : float, optional
        Relative to the largest eigenvalue of the equilibrated matrix; by default ``m * eps``.
    """
    m = len(gram)
    gram, scale = _equilibrate(gram)
    alive = int((scale > 0).sum())
    cut = relative_cutoff(m, gram.dtype) if cutoff is None else cutoff
    triangle, info = torch.linalg.cholesky_ex(gram)
    # The smallest pivot bounds the smallest eigenvalue from above only, hence the wide margin.
    pivots = triangle.diagonal().square()
    if int(info) == 0 and float(pivots.min()) > 1e4 * m * cut:
        return GramFactor(scale, triangle, None, None, alive, 0.0, float(pivots.min()) / m)
    del triangle
    gram.diagonal().copy_((scale > 0).to(gram.dtype))  # rows that are zero: eigenvalue zero
    eigenvalues, basis = torch.linalg.eigh(gram)
    largest = float(eigenvalues[-1]) if m else 0.0
    keep = eigenvalues > cut * largest if largest > 0 else torch.zeros_like(eigenvalues, dtype=torch.bool)
    rank = int(keep.sum())
    smallest = float(eigenvalues[keep][0]) / largest if rank else 0.0
    return GramFactor(scale, None, basis[:, keep].contiguous(), eigenvalues[keep], rank, 0.0, smallest)


def factor_shifted(gram: Tensor) -> GramFactor:
    r"""Factor :math:`G + \delta D^2` by Cholesky, with the smallest :math:`\delta` that is numerically safe; overwrites.

    For iterations that project again and again: :math:`I - B^\top (G + \delta D^2)^{-1} B` is symmetric with
    eigenvalues in [0, 1], and its fixed points are exactly the kernel of :math:`B` whatever :math:`\delta` is, so no
    rank has to be decided and no row is ever dropped.
    """
    gram, scale = _equilibrate(gram)
    shift = 8.0 * torch.finfo(gram.dtype).eps
    shifted = 0.0
    while True:
        gram.diagonal().add_(shift - shifted)
        shifted = shift
        triangle, info = torch.linalg.cholesky_ex(gram)
        if int(info) == 0:
            return GramFactor(scale, triangle, None, None, None, shift, shift)
        shift *= 4.0
