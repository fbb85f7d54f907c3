r"""Lanczos' process on :math:`A^\top A`, fully reorthogonalized, and what follows from its tridiagonal matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.linalg.rows import Rows


def krylov_basis(rows: Rows, size: int, generator: torch.Generator) -> Tensor:  # (k, P), k <= size
    r"""Return orthonormal vectors that span Krylov spaces of :math:`A^\top A` inside the row space of :math:`A`.

    A space that closes early (an eigenvalue with several eigenvectors is found once) is followed by a new start,
    orthogonal to all before it, until ``size`` vectors are there or the row space is exhausted; the kernel is never
    touched. One product with :math:`A` and one with :math:`A^\top` a vector, :math:`O(k^2 P)` to orthogonalize.
    """
    basis = torch.zeros(size, rows.n_columns, dtype=rows.dtype, device=rows.device)
    found, scale = 0, 0.0
    floor = torch.finfo(rows.dtype).eps * rows.n_columns**0.5
    restart = True
    while found < size:
        if restart:
            seed = torch.randn(1, rows.n_rows, generator=generator, dtype=torch.float64)
            candidate = rows.rmv(seed.to(rows.device, rows.dtype))[0]
        else:
            candidate = rows.rmv(rows.mv(basis[found - 1 : found]))[0]
        scale = max(scale, float(candidate.norm()))
        candidate = _orthogonalize(candidate, basis[:found])
        length = float(candidate.norm())
        if length <= 16 * floor * scale or scale == 0.0:
            if restart:
                break  # even a fresh vector of the row space lies in the span: it is exhausted
            restart = True
            continue
        basis[found] = candidate / length
        found, restart = found + 1, False
    return basis[:found]


def _orthogonalize(vector: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):  # twice is enough (Giraud, Langou and Rozloznik 2005)
        vector = vector - (basis @ vector) @ basis
    return vector


def spectral_quadrature(rows: Rows, *, n_probes: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Return nodes and weights with :math:`\operatorname{tr} f(A^\top A) \approx \sum_j w_j f(\lambda_j)`.

    Stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017): Gaussian probes, a tridiagonal matrix each; the
    weights sum to the number of columns. Exact in expectation for polynomials up to degree ``2 * steps - 1``.
    """
    steps = min(steps, rows.n_columns)
    nodes, weights = [], []
    for _ in range(n_probes):
        start = torch.randn(rows.n_columns, generator=generator, dtype=torch.float64).to(rows.device, rows.dtype)
        basis = torch.zeros(steps, rows.n_columns, dtype=rows.dtype, device=rows.device)
        tridiagonal = torch.zeros(steps, steps, dtype=torch.float64)
        vector, used = start / start.norm(), steps
        for k in range(steps):
            basis[k] = vector
            image = rows.rmv(rows.mv(vector[None]))[0]
            tridiagonal[k, k] = float(image @ vector)
            image = _orthogonalize(image, basis[: k + 1])
            length = float(image.norm())
            if k + 1 == steps or length <= 1e-6 * max(1e-300, float(tridiagonal.diagonal().max())):
                used = k + 1
                break
            tridiagonal[k, k + 1] = tridiagonal[k + 1, k] = length
            vector = image / length
        values, vectors = torch.linalg.eigh(tridiagonal[:used, :used])
        nodes.append(values.clamp_min(0.0))
        weights.append(vectors[0].square() * rows.n_columns / n_probes)
    return torch.cat(nodes), torch.cat(weights)
