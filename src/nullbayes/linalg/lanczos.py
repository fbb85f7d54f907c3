r"""The Lanczos process on :math:`A^\top A`: bases of Krylov spaces, and quadrature from its tridiagonal matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.limits import limits
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import eigh, right_singular

_WATCHED = 16  # extra entries that measure what rounding does in the null space


def krylov_basis(rows: Rows, size: int, generator: torch.Generator) -> Tensor:  # (k, P), k <= size
    r"""Return orthonormal vectors that span a block Krylov space of :math:`A^\top A`, inside the row space.

    It differs from the textbook in three ways:

    1. Vectors come in blocks, so that products are batched and an eigenvalue may have several eigenvectors.
    2. A space that closes early is followed by a fresh block :math:`A^\top \omega`, orthogonal to all before it, until
       there are ``size`` vectors or the row space is exhausted.
    3. Orthogonalization amplifies rounding in the null space from block to block, since zero lies outside the rest of
       the spectrum, and no residual would show it. Every vector therefore carries a few extra entries, for imaginary
       columns in which :math:`A` is zero, which receive rounding of the size of each image: they show what the null
       space receives. A vector that has lost more than half of its digits there, or in its length, is dropped.

    Cost: two products per vector, and :math:`O(k^2 P)` operations to orthogonalize.
    """
    rows.check_whole("A basis of a Krylov space")
    p, eps = rows.n_columns, torch.finfo(rows.dtype).eps
    width = block_width(rows, size)
    basis = torch.zeros(size, p + _WATCHED, dtype=rows.dtype, device=rows.device)
    found, latest = 0, basis[:0]
    while found < size:
        fresh = len(latest) == 0
        if fresh:
            drawn = _gaussian((width, rows.n_rows), generator).to(rows.device, rows.dtype)
            image = rows.rmv(drawn / rows.n_rows**0.5)
        else:
            image = rows.rmv(_unit(rows.mv(latest[:, :p])))  # two products in one go may underflow
        image = _unit(image)
        rounding = _gaussian((len(image), _WATCHED), generator).to(image) * eps
        image = _orthogonalize(torch.cat([image, rounding], dim=1), basis[:found])
        lengths, new = right_singular(image)
        sound = (new[:, p:].norm(dim=1) <= eps**0.5) & (lengths > eps**0.5)
        latest = _orthogonalize(new[sound], basis[:found])[: size - found]
        if fresh and len(latest) == 0:
            break  # even fresh vectors of the row space lie in the span: it is exhausted
        basis[found : found + len(latest)] = latest
        found += len(latest)
    return torch.linalg.qr(basis[:found, :p].T).Q.T if found else basis[:0, :p]


def block_width(rows: Rows, size: int) -> int:
    """Return how many of so many vectors of a Krylov space are found at a time: in a few steps at least."""
    return min(limits(rows.device).lanczos_vectors, -(-size // 4))


def _gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw on the generator's device, so that rows on any device get the same numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def _unit(vectors: Tensor) -> Tensor:  # (n, ...)
    """Scale to length one, even if the square of the length is out of range."""
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True, dtype=torch.float64)
    unit: Tensor = vectors / lengths.clamp_min(torch.finfo(vectors.dtype).tiny).to(vectors.dtype)
    return unit


def _orthogonalize(vectors: Tensor, basis: Tensor) -> Tensor:  # (..., P), (k, P)
    for _ in range(2):  # twice is enough (Giraud, Langou and Rozloznik 2005)
        vectors = vectors - (vectors @ basis.T) @ basis
    return vectors


def spectral_quadrature(rows: Rows, *, n_probes: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Return nodes and weights with :math:`\operatorname{tr} f(A^\top A) \approx \sum_j w_j f(\lambda_j)`.

    Stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017) with Gaussian probes and a tridiagonal matrix for each.
    The weights sum to the number of columns. It is exact in expectation for polynomials up to degree ``2 * steps - 1``.
    """

    def product(vector: Tensor) -> Tensor:
        return rows.rmv(rows.mv(vector[None]))[0]

    rules = [
        gauss_rule(product, _gaussian((rows.n_columns,), generator).to(rows.device, rows.dtype), steps)
        for _ in range(n_probes)
    ]
    nodes, weights = (torch.cat(parts) for parts in zip(*rules, strict=True))
    return nodes, weights * rows.n_columns / n_probes


def gauss_rule(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    r"""Return nodes and weights with :math:`u^\top f(M) u \approx \sum_j w_j f(\lambda_j)`, u the start, of length one.

    ``product`` multiplies with a symmetric positive semi-definite matrix M. The Lanczos process from the start vector
    is fully reorthogonalized; the weights sum to one.
    """
    steps = min(steps, len(start))
    basis = torch.zeros(steps, len(start), dtype=start.dtype, device=start.device)
    tridiagonal = torch.zeros(steps, steps, dtype=torch.float64, device="cpu")
    vector, used = start / start.norm(), steps
    for k in range(steps):
        basis[k] = vector
        image = product(vector)
        tridiagonal[k, k] = float(image @ vector)
        image = _orthogonalize(image, basis[: k + 1])
        length = float(image.norm())
        if k + 1 == steps or length <= 1e-6 * max(1e-300, float(tridiagonal.diagonal().max())):
            used = k + 1
            break
        tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = length
        vector = image / length
    values, vectors = eigh(tridiagonal[:used, :used])
    return values.clamp_min(0.0), vectors[0].square()


@dataclass(frozen=True)
class Recurrence:
    """What remains of a Lanczos process besides its vectors."""

    tridiagonal: Tensor  # (k, k)
    watched: Tensor  # (k, _WATCHED)
    rounding: float  # eps

    def in_row_space(self) -> Tensor:  # (k, r)
        """Return combinations of the vectors, in columns, that lie in the row space: Ritz vectors, some of them twice.

        Zero is an eigenvalue as well, and rounding leads the process to it; the watched entries show which Ritz vectors
        consist of rounding.
        """
        _, ritz = eigh(self.tridiagonal)
        sound: Tensor = (ritz.T @ self.watched).norm(dim=1) <= self.rounding**0.25
        combinations: Tensor = ritz[:, sound]
        return combinations


def lanczos_process(
    rows: Rows, size: int, generator: torch.Generator, keep: Callable[[int, Tensor], None]
) -> Recurrence:
    r"""Run at most ``size`` steps of the Lanczos process on :math:`A^\top A`, with two vectors in memory.

    Each vector (P,) is passed to ``keep`` with its number. This is the three-term recurrence without
    reorthogonalization (Lanczos 1950): distant vectors need not be orthogonal, and an eigenvalue may be found several
    times (Paige 1972), so the caller has to orthonormalize what they span. It takes two products per vector.
    """
    eps = torch.finfo(rows.dtype).eps
    tridiagonal = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    watched = torch.zeros(size, _WATCHED, dtype=torch.float64, device="cpu")
    vector = rows.rmv(_gaussian((1, rows.n_rows), generator).to(rows.device, rows.dtype))[0]
    before, found = torch.zeros_like(vector), 0
    step, length = 0.0, float(vector.norm())
    while found < size and length > 0.0:
        vector = vector / length
        keep(found, vector)
        product = rows.rmv(rows.mv(vector[None]))[0]
        image = product - step * before
        shadow = _gaussian((_WATCHED,), generator).cpu() * (eps * float(product.norm()))
        shadow -= step * watched[found - 1] if found else 0.0
        for _ in range(2):  # once more, for what rounding left
            along = float(image @ vector)
            tridiagonal[found, found] += along
            image, shadow = image - along * vector, shadow - along * watched[found]
        step = length = float(image.norm())
        found += 1
        if step <= eps * float(tridiagonal.max()):
            break
        if found < size:
            tridiagonal[found - 1, found] = tridiagonal[found, found - 1] = step
            watched[found] = shadow / step
        before, vector = vector, image
    return Recurrence(tridiagonal[:found, :found], watched[:found], eps)
