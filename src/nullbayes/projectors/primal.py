r"""ExactPrimal: the kernel from :math:`A^\top A`, for few parameters and any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import leading, relative_cutoff
from nullbayes.projectors.base import (
    BLOCKS_INSTEAD,
    Callback,
    Outcome,
    Projection,
    Projector,
    check_cutoff,
    check_noise,
    check_tolerance,
    conclude,
)


@dataclass(frozen=True)
class PrimalState:
    """An orthonormal basis of what is removed."""

    rows: Rows
    removed: Tensor  # (P, r)
    cutoff: float
    typical: float  # root mean square of |A noise|, where the tolerance holds in the mean; else 0


@dataclass(frozen=True)
class ExactPrimal(Projector):
    r"""Project by the eigenvectors of :math:`A^\top A`, in float64.

    Cost: :math:`R P^2` operations to form it, about :math:`9 P^3` for its eigenvectors; memory :math:`16 P^2` bytes.
    Wins for small networks on much data, where the Gram matrix of the rows is the larger one.

    Parameters
    ----------
    truncate : bool
        With more rows than parameters the exact kernel is empty. ``truncate=True`` removes no more directions, leading
        ones first, than it takes to reach ``rtol`` in the mean: a numerical kernel that no order of blocks and no
        number of sweeps can change.
    cutoff : float, optional
        Relative eigenvalue cut when not truncating; default ``P * eps``, rows scaled to unit length.
    rtol, atol : float
        The stopping sentence.
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

    def prepare(self, rows: Rows) -> PrimalState:
        """Form the matrix and find its eigenvectors."""
        p = rows.n_columns
        spared = self.rtol if self.truncate else 0.0
        scaled = normal_matrix(rows, rows.unit_scale(spared))  # the kernel does not depend on the lengths, the cut does
        eigenvalues, vectors = torch.linalg.eigh(scaled)
        eigenvalues = eigenvalues.clamp_min(0.0)
        cut = relative_cutoff(p, rows.dtype) if self.cutoff is None else self.cutoff
        stay = int((eigenvalues <= cut * eigenvalues[-1]).sum())
        typical = 0.0
        if self.truncate:
            plain = normal_matrix(rows)
            stay = max(stay, leading(eigenvalues, ((plain @ vectors) * vectors).sum(0).clamp_min(0.0), self.rtol))
            typical = float(plain.trace().sqrt())
        return PrimalState(rows, vectors[:, stay:].to(rows.dtype).contiguous(), cut, typical)

    def apply(self, state: PrimalState, noise: Tensor, *, callback: Callback | None = None) -> Projection:
        """Project each row of ``noise`` (S, P)."""
        noise = check_noise(state.rows, noise)
        directions = noise
        for _ in range(2):  # the second pass removes what rounding left of the first
            directions = directions - (directions @ state.removed) @ state.removed.T
        return conclude(
            self, state.rows, noise, directions, sweeps=1,
            failure=Outcome.TRUNCATED if self.truncate else Outcome.STAGNATED, rank=state.removed.shape[1],
            precision=torch.float64, cutoff=state.cutoff, typical=state.typical, callback=callback,
        )  # fmt: skip
