r"""Direct methods: a matrix is factored once, and what it spans is removed from any noise.

``ExactDual`` factors the Gram matrix of the rows, ``ExactPrimal`` their normal matrix :math:`A^\top A`, and ``Lanczos``
(the paper's Proj-Lanczos) takes a Krylov space of the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.lanczos import krylov_basis
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import GramFactor, eigh, factor_exact, factor_truncated, leading, relative_cutoff
from nullbayes.projectors.base import Callback, Outcome, Projection, Projector, Store
from nullbayes.projectors.stopping import (
    Attempt,
    check_cutoff,
    check_least,
    check_noise,
    check_tolerance,
    finish_projection,
)


@dataclass(frozen=True)
class DirectState:
    """The rows, and the map from vectors to what is removed from them."""

    rows: Rows
    correction: Callable[[Tensor], Tensor]  # (S, P) -> (S, P)
    rank: int | None
    sweeps: int  # passes over the rows
    precision: torch.dtype
    truncated: bool  # whether directions of the row space were left on purpose
    cutoff: float | None = None
    frobenius: float = 0.0  # Frobenius norm of the rows, where the tolerance holds in the mean over noise


class Direct(Projector):
    """A projector whose map is the same for all noise; a subclass prepares a :class:`DirectState`."""

    @property
    def memory_advice(self) -> str:
        """Advise a method that needs no matrix of all rows or columns."""
        return "use nb.projectors.Krylov(nb.projectors.Alternating(block_rows=...)), which needs no matrix of all rows"

    def _apply(self, state: DirectState, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        noise = check_noise(state.rows, noise)
        directions = noise
        for _ in range(2):  # the second pass removes what rounding left of the first
            directions = directions - state.correction(directions)
        attempt = Attempt(
            directions,
            sweeps=state.sweeps,
            failure=Outcome.TRUNCATED if state.truncated else Outcome.STAGNATED,
            precision=state.precision,
            rank=state.rank,
            cutoff=state.cutoff,
            frobenius=state.frobenius,
        )
        return finish_projection(self, state.rows, noise, attempt, callback)


@dataclass(frozen=True)
class ExactDual(Direct):
    r"""Project by factoring the Gram matrix of all R rows in float64: :math:`v = ε - A^\top (A A^\top)^+ A ε`.

    Cost: :math:`R^2 P` operations for the matrix (half of it by symmetry), :math:`R^3/3` to factor, :math:`4RP` per
    sample; memory :math:`8 R^2` bytes, twice that where an eigendecomposition is needed. Wins whenever the Gram matrix
    is affordable. Singular values below :math:`\sqrt{R\,\mathrm{eps}}` of the largest, after scaling the rows to unit
    length, count as zero.

    Parameters
    ----------
    truncate : bool
        Remove no more directions, leading ones first, than it takes to reach ``rtol`` in the mean. What remains is
        larger than the null space: it includes directions that change the training outputs by less than the tolerance.
        They are most of what varies between and beyond the data when the spectrum has no gap. Costs eigenvectors
        instead of a Cholesky factor.
    cutoff : float, optional
        Relative eigenvalue cut of the (equilibrated) Gram matrix; default ``R * eps``.
    rtol, atol : float
        The tolerance that the result is judged by, relative to ``|A noise|`` and absolute.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.ExactDual()
    >>> state = projector.prepare(nb.DenseRows(torch.eye(2, 3)))
    >>> projector.apply(state, torch.ones(1, 3)).directions
    tensor([[0., 0., 1.]])
    """

    truncate: bool = False
    cutoff: float | None = None
    rtol: float = 1e-4
    atol: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_cutoff(self.cutoff)

    def _prepare(self, rows: Rows) -> DirectState:
        cutoff = relative_cutoff(rows.n_rows, rows.dtype) if self.cutoff is None else self.cutoff

        def form() -> Tensor:
            return rows.gram(torch.float64)

        frobenius = 0.0
        if self.truncate:
            gram = form()
            frobenius = float(gram.trace().sqrt())
            factor: GramFactor = factor_truncated(gram, self.rtol, cutoff, rows.spared(self.rtol))
        else:
            factor = factor_exact(form, cutoff)

        def correction(vectors: Tensor) -> Tensor:
            return rows.rmv(factor.solve(rows.mv(vectors)))

        return DirectState(rows, correction, factor.rank, 2, torch.float64, self.truncate, cutoff, frobenius)


@dataclass(frozen=True)
class ExactPrimal(Direct):
    r"""Project by the eigenvectors of :math:`A^\top A`, in float64.

    Cost: :math:`R P^2` operations to form it, about :math:`9 P^3` for its eigenvectors; memory :math:`16 P^2` bytes.
    Wins for small networks on much data, where the Gram matrix of the rows is the larger one.

    Parameters
    ----------
    truncate : bool
        With more rows than parameters there may be no exact null space. ``truncate=True`` removes no more directions,
        leading ones first, than it takes to reach ``rtol`` in the mean: a numerical null space that does not depend on
        an order of blocks or a number of sweeps.
    cutoff : float, optional
        Relative eigenvalue cut when not truncating; default ``P * eps``, rows scaled to unit length.
    rtol, atol : float
        The tolerance that the result is judged by, relative to ``|A noise|`` and absolute.

    Examples
    --------
    The second column is hardly seen, so that a tolerance of a hundredth leaves it free:

    >>> import torch
    >>> import nullbayes as nb
    >>> rows, noise = nb.DenseRows(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.001]])), torch.ones(1, 2)
    >>> for truncate in (False, True):
    ...     projector = nb.projectors.ExactPrimal(truncate=truncate, rtol=1e-2)
    ...     print(projector.apply(projector.prepare(rows), noise).directions.round(decimals=2))
    tensor([[0., 0.]])
    tensor([[0., 1.]])
    """

    truncate: bool = False
    cutoff: float | None = None
    rtol: float = 1e-4
    atol: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_cutoff(self.cutoff)

    def _prepare(self, rows: Rows) -> DirectState:
        spared = self.rtol if self.truncate else 0.0
        scaled = normal_matrix(rows, rows.unit_scale(spared))  # the cut depends on row lengths, the null space does not
        eigenvalues, vectors = eigh(scaled)
        eigenvalues = eigenvalues.clamp_min(0.0)
        cutoff = relative_cutoff(rows.n_columns, rows.dtype) if self.cutoff is None else self.cutoff
        start, frobenius = int((eigenvalues <= cutoff * eigenvalues[-1]).sum()), 0.0
        if self.truncate:
            plain = normal_matrix(rows)
            start = max(start, leading(eigenvalues, ((plain @ vectors) * vectors).sum(0).clamp_min(0.0), self.rtol))
            frobenius = float(plain.trace().sqrt())
        basis = vectors[:, start:].to(rows.dtype).contiguous()
        rank = basis.shape[1]
        return DirectState(rows, _onto(basis), rank, 1, torch.float64, self.truncate, cutoff, frobenius)


@dataclass(frozen=True)
class Lanczos(Direct):
    r"""Remove the directions that carry most of :math:`\|A v\|`, at most ``rank`` of them.

    Cost: ``rank`` products with :math:`A` and its transpose, one vector at a time, and :math:`2 k^2 P` to keep the
    basis orthogonal; memory ``rank * P`` numbers. It works where not even one block can be formed. Only what lies in
    the row space is removed, so the null space itself is untouched; a spectrum with a long tail leaves a residual,
    which is reported.

    Parameters
    ----------
    rank : int
        The number of basis vectors.
    seed : int
        Seed of the start vectors.
    rtol, atol : float
        The tolerance that the result is judged by, relative to ``|A noise|`` and absolute.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.Lanczos(rank=2)
    >>> projection = projector.apply(projector.prepare(nb.DenseRows(torch.eye(2, 5))), torch.ones(1, 5))
    >>> projection.info.kernel_dimension
    3.0
    """

    rank: int = 300
    seed: int = 0
    rtol: float = 1e-2
    atol: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_least("rank", self.rank, 1)

    @property
    def memory_advice(self) -> str:
        """Advise a smaller basis."""
        return "lower rank"

    def _prepare(self, rows: Rows) -> DirectState:
        size = min(self.rank, rows.n_rows, rows.n_columns)
        basis = krylov_basis(rows, size, torch.Generator().manual_seed(self.seed))
        return DirectState(rows, _onto(basis.T), len(basis), len(basis), rows.dtype, truncated=True)


def _onto(basis: Tensor) -> Callable[[Tensor], Tensor]:  # (P, r)
    """Return the orthogonal projection onto the span of orthonormal columns."""
    return lambda vectors: (vectors @ basis) @ basis.T
