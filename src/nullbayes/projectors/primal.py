r"""ExactPrimal: the null space from :math:`A^\top A`, for few parameters and any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import leading, relative_cutoff
from nullbayes.projectors.base import BLOCKS_INSTEAD, Callback, Outcome, Projection, Projector, Store
from nullbayes.projectors.stopping import Attempt, check_cutoff, check_noise, check_tolerance, finish_projection


@dataclass(frozen=True)
class PrimalState:
    """The rows, and an orthonormal basis of what is removed."""

    rows: Rows
    basis: Tensor  # (P, r)
    cutoff: float
    frobenius: float  # Frobenius norm of the rows, where the tolerance holds in the mean over noise; else 0


@dataclass(frozen=True)
class ExactPrimal(Projector):
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
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.ExactPrimal()
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

    @property
    def memory_advice(self) -> str:
        """Advise a method that needs no matrix of all rows."""
        return BLOCKS_INSTEAD

    def _prepare(self, rows: Rows) -> PrimalState:
        p = rows.n_columns
        spared = self.rtol if self.truncate else 0.0
        scaled = normal_matrix(rows, rows.unit_scale(spared))  # the cut depends on row lengths, the null space does not
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        eigenvalues = eigenvalues.clamp_min(0.0)
        cut = relative_cutoff(p, rows.dtype) if self.cutoff is None else self.cutoff
        start = int((eigenvalues <= cut * eigenvalues[-1]).sum())
        frobenius = 0.0
        if self.truncate:
            plain = normal_matrix(rows)
            start = max(start, leading(eigenvalues, ((plain @ vectors) * vectors).sum(0).clamp_min(0.0), self.rtol))
            frobenius = float(plain.trace().sqrt())
        return PrimalState(rows, vectors[:, start:].to(rows.dtype).contiguous(), cut, frobenius)

    def _apply(self, state: PrimalState, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        noise = check_noise(state.rows, noise)
        directions = noise
        for _ in range(2):  # the second pass removes what rounding left of the first
            directions = directions - (directions @ state.basis) @ state.basis.T
        attempt = Attempt(
            directions,
            sweeps=1,
            failure=Outcome.TRUNCATED if self.truncate else Outcome.STAGNATED,
            precision=torch.float64,
            rank=state.basis.shape[1],
            cutoff=state.cutoff,
            frobenius=state.frobenius,
        )
        return finish_projection(self, state.rows, noise, attempt, callback)
