r"""The matrix :math:`A^\top A` by products alone: sample, then optimize.

A sample solves :math:`(A^\top A + \alpha I)\,x = A^\top \varepsilon_1 + \sqrt\alpha\,\varepsilon_2`, whose right-hand
side has the matrix itself as its covariance (Papandreou and Yuille 2010; Antorán et al. 2023). Conjugate gradients
solve it, preconditioned by the largest eigenpairs, which a Krylov space has found once for all :math:`\alpha`.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from nullbayes.errors import ConvergenceWarning
from nullbayes.linalg.curvature.base import Curvature
from nullbayes.linalg.curvature.low_rank import LowRank, lanczos_pairs
from nullbayes.linalg.lanczos import spectral_quadrature
from nullbayes.linalg.rows import Rows
from nullbayes.precision import full_precision

_PROBES, _QUADRATURE_STEPS = 8, 64  # for the eigenvalues


class MatrixFree(Curvature):
    """Solves by preconditioned conjugate gradients.

    Parameters
    ----------
    rows : Rows
        Kept: every sample multiplies with them.
    rank : int
        Eigenpairs that precondition.
    generator : torch.Generator
        For the Krylov space and the probes of the spectrum.
    rtol : float, optional
        Of the residual, beside the right-hand side; default: what float32 can reach safely.
    max_steps : int
        How long to try.
    """

    def __init__(
        self, rows: Rows, rank: int, generator: torch.Generator, rtol: float | None = None, max_steps: int = 1000
    ) -> None:
        self.rows = rows
        self.n_columns, self.rank = rows.n_columns, min(rows.n_rows, rows.n_columns)
        self.rtol = rtol if rtol is not None else max(1e-8, 40.0 * torch.finfo(rows.dtype).eps)
        self.max_steps = max_steps
        self._preconditioner: LowRank = lanczos_pairs(rows, rank, generator)
        self._generator = generator
        self._spectrum: tuple[Tensor, Tensor] | None = None

    @property
    def noise_size(self) -> int:
        """One number a column, and one a row."""
        return self.n_columns + self.rows.n_rows

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Solve for each sample, all at once."""
        columns, rows = noise[:, : self.n_columns], noise[:, self.n_columns :]
        return self.solve(self.rows.rmv(rows) + math.sqrt(alpha) * columns, alpha)

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Solve for each row."""
        return (rows * self.solve(rows, alpha)).sum(1)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return nodes and weights of a stochastic quadrature."""
        if self._spectrum is None:
            self._spectrum = spectral_quadrature(
                self.rows, n_probes=_PROBES, steps=_QUADRATURE_STEPS, generator=self._generator
            )
        return self._spectrum

    @full_precision()
    def solve(self, vectors: Tensor, alpha: float) -> Tensor:  # (S, P) -> (S, P)
        r"""Apply :math:`(A^\top A + \alpha I)^{-1}`."""
        precondition, tiny = self._preconditioner.solve, torch.finfo(vectors.dtype).tiny
        target = self.rtol * vectors.norm(dim=1)
        x, residual = torch.zeros_like(vectors), vectors
        search = torch.zeros_like(vectors)
        energy = vectors.new_ones(len(vectors))
        active, why = residual.norm(dim=1) > target, f"after {self.max_steps} steps"
        for _ in range(self.max_steps):
            if not bool(active.any()):
                return x
            z = precondition(residual, alpha)
            before, energy = energy, (residual * z).sum(1)
            search = z + (energy / before.clamp_min(tiny))[:, None] * search
            image = self.rows.rmv(self.rows.mv(search)) + alpha * search
            curvature = (search * image).sum(1)
            if bool((active & ~((energy > 0) & (curvature > 0) & torch.isfinite(energy / curvature))).any()):
                why = f"where rounding in {str(vectors.dtype).removeprefix('torch.')} lets it go no further"
                break
            length = torch.where(active, energy / curvature.clamp_min(tiny), 0.0)[:, None]
            x, residual = x + length * search, residual - length * image
            active = residual.norm(dim=1) > target
        worst = float((residual.norm(dim=1) / vectors.norm(dim=1).clamp_min(tiny)).max())
        message = (
            f"Conjugate gradients stopped {why} at a relative residual of {worst:.1e}, {self.rtol:.1e} was asked for: "
            "use a larger prior_precision, or more memory_limit for a direct method."
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
        return x
