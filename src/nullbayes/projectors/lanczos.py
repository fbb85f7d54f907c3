r"""Lanczos: removes a Krylov space of :math:`A^\top A`, the paper's Proj-Lanczos."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.lanczos import krylov_basis
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.base import (
    Callback,
    Outcome,
    Projection,
    Projector,
    check_noise,
    check_tolerance,
    conclude,
)


@dataclass(frozen=True)
class LanczosState:
    """An orthonormal basis of what is removed."""

    rows: Rows
    removed: Tensor  # (k, P)


@dataclass(frozen=True)
class Lanczos(Projector):
    r"""Remove the directions that carry most of :math:`\|A v\|`, at most ``rank`` of them.

    Cost: ``rank`` products with :math:`A` and its transpose, one vector at a time, and :math:`2 k^2 P` to keep the
    basis orthogonal; memory ``rank * P`` numbers. Works where not even one block can be formed. Only what lies in the
    row space is removed, so the kernel itself is untouched; a spectrum with a long tail leaves a residual, which is
    reported.

    Parameters
    ----------
    rank : int
        The number of basis vectors.
    seed : int
        Of the start vector.
    rtol, atol : float
        The stopping sentence, to judge the result by.
    """

    rank: int = 300
    seed: int = 0
    rtol: float = 1e-2
    atol: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        if self.rank < 1:
            msg = f"rank must be at least 1, not {self.rank}."
            raise SettingsError(msg)

    @property
    def memory_advice(self) -> str:
        """Advise a smaller basis."""
        return "lower rank"

    def prepare(self, rows: Rows) -> LanczosState:
        """Build the basis."""
        size = min(self.rank, rows.n_rows, rows.n_columns)
        return LanczosState(rows, krylov_basis(rows, size, torch.Generator().manual_seed(self.seed)))

    def apply(self, state: LanczosState, noise: Tensor, *, callback: Callback | None = None) -> Projection:
        """Project each row of ``noise`` (S, P)."""
        noise = check_noise(state.rows, noise)
        directions = noise
        for _ in range(2):  # the second pass removes what rounding left of the first
            directions = directions - (directions @ state.removed.T) @ state.removed
        return conclude(
            self, state.rows, noise, directions, sweeps=len(state.removed), failure=Outcome.TRUNCATED,
            rank=len(state.removed), precision=state.rows.dtype, callback=callback,
        )  # fmt: skip
