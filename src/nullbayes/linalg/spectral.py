r"""Factors of Gram and normal matrices, and the decision about rank.

A Gram matrix :math:`G = B B^\top` squares the condition number of :math:`B`. Its rows are therefore *equilibrated*
first, :math:`D^{-1} G D^{-1}` with :math:`D` the row lengths: a null space does not depend on the length of the rows,
and loss gradients of well-fitted examples are easily a million times shorter than the others. A row shorter than the
square root of the smallest normal number counts as zero.

A Cholesky factor overwrites its matrix, one panel at a time, so that no second matrix is needed. Its diagonal blocks
are replaced by their inverses: substitution then consists of matrix products, which devices compute at full speed,
while triangular solves with few right-hand sides are slow. Inverting blocks of a Cholesky factor loses the square root
of the condition number, as much as the factor itself has lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.limits import half_is_fast, panel_columns
from nullbayes.linalg.halves import add_product, split

_TRAPEZOID = 2  # panels of a Cholesky factor per trapezoid of what is left to update


def relative_cutoff(size: int, rows_dtype: torch.dtype) -> float:
    """Return the cut below which an eigenvalue of a Gram matrix, relative to the largest, is rounding.

    Two roundings count: that of the Gram matrix itself, ``size * eps``, and that of products with the rows, which reach
    singular values of a few ``eps`` and therefore eigenvalues of its square.

    Two places decide rank otherwise, because they work in the precision of the rows and not in float64: a coarse space
    drops eigenvalues below ``size * eps``, and a Krylov basis drops vectors that have lost half of their digits.
    """
    return size * max(torch.finfo(torch.float64).eps, (8.0 * torch.finfo(rows_dtype).eps) ** 2)


@dataclass(frozen=True, slots=True)
class CholeskyFactor:
    r"""Applies :math:`(G + \delta D^2)^{-1}` by a Cholesky factor of the equilibrated matrix."""

    scale: Tensor  # (m,) one over the row lengths; zero for rows that are zero
    triangle: Tensor  # (m, m) as cholesky_ leaves it
    rank: int | None  # numerical rank; None for a shifted factor, which decides none
    shift: float = 0.0  # δ

    def solve(self, vectors: Tensor) -> Tensor:  # (S, m) -> (S, m)
        """Apply the inverse to each vector, in the factor's precision."""
        solved = cholesky_solve(self.triangle, vectors.to(self.scale.dtype) * self.scale)
        return (solved * self.scale).to(vectors.dtype)


@dataclass(frozen=True, slots=True)
class EigenFactor:
    """Applies the pseudo-inverse of a Gram matrix by the eigenvectors of the equilibrated one above a cut."""

    scale: Tensor  # (m,) one over the row lengths; zero for rows that are zero
    basis: Tensor  # (m, r)
    eigenvalues: Tensor  # (r,)

    @property
    def rank(self) -> int:
        """The number of eigenvectors."""
        return len(self.eigenvalues)

    def solve(self, vectors: Tensor) -> Tensor:  # (S, m) -> (S, m)
        """Apply the pseudo-inverse to each vector, in the factor's precision."""
        scaled = vectors.to(self.scale.dtype) * self.scale
        solved = (scaled @ self.basis / self.eigenvalues) @ self.basis.T
        return (solved * self.scale).to(vectors.dtype)


GramFactor = CholeskyFactor | EigenFactor


def _equilibrate(gram: Tensor, spared: float = 0.0) -> tuple[Tensor, Tensor]:
    """Scale ``gram`` in place to a unit diagonal (one where a row is zero); return it and the scales.

    Rows no longer than ``spared`` are scaled as one of that length would be, and keep a diagonal below one.
    """
    diagonal = gram.diagonal().clone()
    if not torch.isfinite(diagonal).all():
        msg = "A Gram matrix holds NaN or Inf: look for them in the rows, or for entries whose squares overflow."
        raise NullBayesError(msg)
    tiny = torch.finfo(gram.dtype).tiny
    alive, least = diagonal > tiny, max(tiny, spared**2)
    scale = torch.where(alive, diagonal.clamp_min(least).rsqrt(), 0.0)
    gram.mul_(scale).mul_(scale[:, None])
    gram.diagonal().copy_(torch.where(alive, diagonal.clamp_max(least) / least, 1.0))
    return gram, scale


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:  # (m, m) -> (m,), (m, m)
    """Return the eigenvalues of a symmetric matrix, ascending, and its eigenvectors as columns.

    The solvers of CUDA devices give up on some matrices whose eigenvalues span many orders of magnitude. The host
    solves these.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if not bool(torch.isfinite(matrix).all()):
            raise
        values, vectors = (part.to(matrix.device) for part in torch.linalg.eigh(matrix.cpu()))
    return values, vectors


def right_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:  # (m, n) -> (k,), (k, n), k = min(m, n)
    """Return the singular values of a wide matrix, descending, and its right singular vectors as rows.

    They are those of a small square matrix, turned. The solvers of CUDA devices take far longer for the wide one.
    """
    space, small = torch.linalg.qr(matrix.T)
    _, lengths, turn = torch.linalg.svd(small.T, full_matrices=False)
    return lengths, turn @ space.T


def factor_exact(form: Callable[[], Tensor], cutoff: float) -> GramFactor:
    r"""Factor a Gram matrix for :math:`G^+`, in its own place.

    Cholesky where the matrix is safely regular, else the eigenvectors above the cut. Singular values of the rows below
    :math:`\sqrt{\text{cutoff}}` times the largest count as zero: that is what squaring costs. ``form`` forms the matrix
    (m, m), a second time if Cholesky fails; ``cutoff`` is relative to the largest eigenvalue after equilibration.
    """
    gram, scale = _equilibrate(form())
    largest = _largest_eigenvalue(gram)
    if cholesky_(gram) and _smallest_eigenvalue(gram) > 10.0 * cutoff * largest:
        return CholeskyFactor(scale, gram, int((scale > 0).sum()))
    del gram
    gram, scale = _equilibrate(form())
    gram.diagonal().copy_((scale > 0).to(gram.dtype))  # rows that are zero: eigenvalue zero
    eigenvalues, basis = eigh(gram)
    keep = eigenvalues > cutoff * eigenvalues[-1].clamp_min(0.0)
    return EigenFactor(scale, basis[:, keep].contiguous(), eigenvalues[keep])


def factor_truncated(gram: Tensor, rtol: float, cutoff: float, spared: float = 0.0) -> EigenFactor:
    r"""Factor the fewest leading directions of the equilibrated rows that hold all but ``rtol`` of them.

    See :func:`leading` for the choice; none of them lies below ``cutoff``. ``gram`` is overwritten. Rows no longer than
    ``spared`` are not scaled to unit length.
    """
    gram, scale = _equilibrate(gram, spared)
    gram.diagonal().mul_(scale > 0)
    eigenvalues, basis = eigh(gram)
    eigenvalues = eigenvalues.clamp_min(0.0)
    lengths = torch.where(scale > 0, 1.0 / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0)  # as scaled
    # a unit vector B̃⊤u/√λ̃ changes the rows by λ̃ Σ (length · u)²
    energies = eigenvalues * (lengths.square() @ basis.square())
    start = max(leading(eigenvalues, energies, rtol), int((eigenvalues <= cutoff * eigenvalues[-1]).sum()))
    return EigenFactor(scale, basis[:, start:].contiguous(), eigenvalues[start:])


def leading(eigenvalues: Tensor, energies: Tensor, rtol: float) -> int:
    r"""Return where the leading directions start, among directions in ascending order of their eigenvalue.

    The directions before it leave at most a third of ``rtol`` of the root mean square change of the rows by isotropic
    noise. That holds twice: with every row scaled to unit length (``eigenvalues``), so that short rows count like long
    ones, and with the rows as they are (``energies``), which is what the stopping rule asks. The third leaves room for
    the spread between samples, three standard deviations even where a single direction decides.
    """
    allowed = (rtol / 3.0) ** 2
    stay = [int((e.cumsum(0) <= allowed * e.sum()).sum()) for e in (eigenvalues, energies)]
    return min(stay)


def factor_shifted(
    form: Callable[[], Tensor], rows_dtype: torch.dtype, shift: float = 0.0, spared: float = 0.0
) -> CholeskyFactor:
    r"""Factor :math:`G + \delta D^2` by Cholesky, in the place of :math:`G`.

    For iterations that project again and again: :math:`I - B^\top (G + \delta D^2)^{-1} B` is symmetric with
    eigenvalues in [0, 1], and its fixed points are exactly the null space of :math:`B` for any :math:`\delta`, so no
    rank has to be decided and no row is ever dropped. The shift is at least what two errors ask for: products with the
    rows, rounded at ``eps`` of ``rows_dtype``, are amplified by :math:`1/(2\sqrt\delta)`; and a Gram matrix that was
    itself accumulated in low precision must not seem smaller than it is, or the step would overshoot.

    ``form`` forms :math:`G` (m, m), again if Cholesky fails, and the shift is then raised from ``shift``. Rows no
    longer than ``spared`` count in :math:`D` as if they had that length.
    """
    while True:
        gram, scale = _equilibrate(form(), spared)
        shift = max(shift, least_shift(len(gram), rows_dtype, gram.dtype))
        gram.diagonal().add_(shift)
        if cholesky_(gram, by_halves=gram.dtype == torch.float32 and half_is_fast(gram.device)):
            return CholeskyFactor(scale, gram, None, shift)
        shift *= 4.0


def least_shift(size: int, rows_dtype: torch.dtype, gram_dtype: torch.dtype) -> float:
    """Return the shift that rounding asks for, relative to squared row lengths; see :func:`factor_shifted`."""
    return 8.0 * max(torch.finfo(rows_dtype).eps, math.sqrt(size) * torch.finfo(gram_dtype).eps)


@dataclass(frozen=True, slots=True)
class NormalFactor:
    r"""Applies :math:`I - \delta\,(\tilde A^\top \tilde A + \delta)^{-1}`, with the rows scaled to unit length.

    By Woodbury's identity this is the same map as that of a shifted Gram factor, with a matrix of the columns instead
    of the rows.
    """

    triangle: Tensor  # (P, P)
    shift: float
    leak: float  # relative error that rounding introduces inside the null space

    @property
    def precision(self) -> torch.dtype:
        """In which the factor was computed."""
        return self.triangle.dtype

    def correction(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return the part of each vector that the step removes."""
        wide = vectors.to(self.triangle.dtype)
        return (wide - self.remainder(wide)).to(vectors.dtype)

    def remainder(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        r"""Return the part that it leaves, :math:`\delta\,(\tilde A^\top \tilde A + \delta)^{-1} v`."""
        return (self.shift * cholesky_solve(self.triangle, vectors.to(self.triangle.dtype))).to(vectors.dtype)


def factor_normal(form: Callable[[], Tensor], rows_dtype: torch.dtype, shift: float = 0.0) -> NormalFactor:
    """Factor the shifted normal matrix of rows of unit length, in its own place."""
    while True:
        matrix = form()
        # solving with it, rounding removes eps λ / δ of a vector in the null space: the shift keeps that below what
        # products with the rows lose anyway
        rounding = torch.finfo(matrix.dtype).eps * _largest_eigenvalue(matrix)
        shift = max(shift, torch.finfo(matrix.dtype).eps, rounding / max(8.0 * torch.finfo(rows_dtype).eps, 1e-10))
        matrix.diagonal().add_(shift)
        if cholesky_(matrix):
            return NormalFactor(matrix, shift, rounding / shift)
        shift *= 4.0


def largest_growth(
    apply: Callable[[Tensor], Tensor],  # (S, n) -> (S, n)
    start: Tensor,
    steps: int = 8,
    length: Callable[[Tensor], Tensor] = lambda vectors: vectors.norm(dim=1),  # (S, n) -> (S,)
) -> float:
    """Return the most that a linear map lengthens a vector, by the power method from a few start vectors."""
    vectors, growth, tiny = start, 1.0, torch.finfo(start.dtype).tiny
    for _ in range(steps):
        vectors = apply(vectors / length(vectors).clamp_min(tiny).to(vectors.dtype)[:, None])
        growth = float(length(vectors).max())
    return growth


def _largest_eigenvalue(matrix: Tensor) -> float:
    return largest_growth(lambda vectors: vectors @ matrix, _start_vectors(matrix))


def _smallest_eigenvalue(triangle: Tensor) -> float:
    """Return the smallest eigenvalue of the matrix with this Cholesky factor, by inverse iteration."""
    return 1.0 / largest_growth(lambda vectors: cholesky_solve(triangle, vectors), _start_vectors(triangle))


def _start_vectors(like: Tensor) -> Tensor:  # (m, m) -> (4, m)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(like), 4, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(like.device, like.dtype).T.contiguous()


def cholesky_(matrix: Tensor, *, by_halves: bool = False) -> bool:
    """Overwrite a symmetric matrix by its Cholesky factor, for :func:`cholesky_solve`; only its lower triangle is read.

    Diagonal blocks hold the inverse of the factor's own, and what lies above them means nothing. Returns False, with
    the matrix spoiled, if it is not positive definite in its own precision. ``by_halves`` is for float32 matrices: all
    but the diagonal blocks, which are factored in float64, is then computed by products of halves.
    """
    edges = _edges(matrix)
    update = _halves_update(matrix) if by_halves else _update
    for start, stop in pairwise(edges):
        corner = matrix[start:stop, start:stop]
        corner, info = torch.linalg.cholesky_ex(corner.double() if by_halves else corner)
        if int(info) != 0:
            return False
        eye = torch.eye(stop - start, dtype=corner.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(corner, eye, upper=False).to(matrix.dtype)
        matrix[start:stop, start:stop] = inverse
        below = matrix[stop:, start:stop]
        below.copy_(below @ inverse.mT)
        trapezoids = pairwise(edges[edges.index(stop) :: _TRAPEZOID] + edges[-1:])
        update(matrix[stop:, stop:], below, [(left - stop, right - stop) for left, right in trapezoids if left < right])
    return True


_Cuts = Sequence[tuple[int, int]]


def _update(rest: Tensor, below: Tensor, cuts: _Cuts) -> None:
    """Subtract ``below @ below.T`` from the lower triangle of what is left of a matrix."""
    for left, right in cuts:
        rest[left:, left:right].addmm_(below[left:], below[left:right].mT, alpha=-1.0)


def _halves_update(matrix: Tensor) -> Callable[[Tensor, Tensor, _Cuts], None]:
    """Return the same by products of halves."""
    # no entry of the factor is larger than the root of the largest of the diagonal
    scale = 2.0 ** math.floor(
        10.0 - 0.5 * math.log2(max(float(matrix.diagonal().max()), torch.finfo(matrix.dtype).tiny))
    )

    def update(rest: Tensor, below: Tensor, cuts: _Cuts) -> None:
        if not cuts:
            return
        lefts, rights = (split(scale * below.T, right=right) for right in (False, True))
        for left, right in cuts:
            add_product(
                rest[left:, left:right], lefts[:, :, left : len(below)], rights[:, :, left:right], alpha=-(scale**-2)
            )

    return update


def cholesky_solve(factor: Tensor, vectors: Tensor) -> Tensor:  # (m, m), (S, m) -> (S, m)
    """Solve with the matrix that :func:`cholesky_` has overwritten by ``factor``, for each vector."""
    solved = vectors.T.clone(memory_format=torch.contiguous_format)  # (m, S)
    blocks = list(pairwise(_edges(factor)))
    for start, stop in blocks:
        part = solved[start:stop]
        if start:
            part = torch.addmm(part, factor[start:stop, :start], solved[:start], alpha=-1.0)
        solved[start:stop] = factor[start:stop, start:stop] @ part
    for start, stop in reversed(blocks):
        part = solved[start:stop]
        if stop < len(factor):
            part = torch.addmm(part, factor[stop:, start:stop].mT, solved[stop:], alpha=-1.0)
        solved[start:stop] = factor[start:stop, start:stop].mT @ part
    return solved.T


def _edges(matrix: Tensor) -> list[int]:
    return [*range(0, len(matrix), panel_columns(len(matrix), matrix.device)), len(matrix)]
