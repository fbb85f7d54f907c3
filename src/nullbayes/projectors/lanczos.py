r"""Lanczos: removes a Krylov space of :math:`A^\top A`, the paper's Proj-Lanczos."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.lanczos import krylov_basis
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.base import Callback, Outcome, Projection, Projector, Store
from nullbayes.projectors.stopping import Attempt, check_least, check_noise, check_tolerance, finish_projection


@dataclass(frozen=True)
class LanczosState:
    """The rows, and an orthonormal basis of what is removed."""

    rows: Rows
    basis: Tensor  # (k, P)


@dataclass(frozen=True)
class Lanczos(Projector):
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

    def _prepare(self, rows: Rows) -> LanczosState:
        size = min(self.rank, rows.n_rows, rows.n_columns)
        return LanczosState(rows, krylov_basis(rows, size, torch.Generator().manual_seed(self.seed)))

    def _apply(self, state: LanczosState, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        noise = check_noise(state.rows, noise)
        directions, rank = noise, len(state.basis)
        for _ in range(2):  # the second pass removes what rounding left of the first
            directions = directions - (directions @ state.basis.T) @ state.basis
        attempt = Attempt(directions, sweeps=rank, failure=Outcome.TRUNCATED, precision=state.rows.dtype, rank=rank)
        return finish_projection(self, state.rows, noise, attempt, callback)
