r"""The matrix :math:`A^\top A` by products alone: every sample is the solution of a linear system.

A sample solves :math:`(A^\top A + \alpha I)\,x = A^\top \varepsilon_1 + \sqrt\alpha\,\varepsilon_2`, whose right-hand
side has the matrix itself as its covariance (Papandreou and Yuille 2010; Antorán et al. 2023). Conjugate gradients
solve it, preconditioned by the largest eigenpairs, which are found once for all :math:`\alpha` in a Krylov space.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from nullbayes.errors import ConvergenceWarning
from nullbayes.linalg.curvature.base import Curvature, estimated_spectrum
from nullbayes.linalg.curvature.low_rank import LowRank, lanczos_pairs
from nullbayes.linalg.rows import Rows
from nullbayes.precision import full_precision

_ROUNDING = 10.0  # times eps: the relative error of a product that rounding explains


class MatrixFree(Curvature):
    """The matrix by its rows; systems are solved by preconditioned conjugate gradients.

    Parameters
    ----------
    rows : Rows
        The rows, which are kept: every sample multiplies with them.
    rank : int
        The number of eigenpairs in the preconditioner.
    generator : torch.Generator
        The source of the Krylov space and of the probes of the spectrum.
    rtol : float, optional
        The residual to reach, relative to the right-hand side; by default what the dtype of the rows can reach safely.
    max_steps : int
        The largest number of steps.
    """

    rows: Rows

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

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Solve one system for each sample, all at once."""
        columns, rows = noise[:, : self.n_columns], noise[:, self.n_columns :]
        return self.solve(self.rows.rmv(rows) + math.sqrt(alpha) * columns, alpha)

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Solve one system for each row."""
        return (rows * self.solve(rows, alpha)).sum(1)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return nodes and weights of a stochastic quadrature."""
        if self._spectrum is None:
            self._spectrum = estimated_spectrum(self.rows, self._generator)
        return self._spectrum

    @full_precision()
    def solve(self, vectors: Tensor, alpha: float) -> Tensor:  # (S, P) -> (S, P)
        r"""Apply :math:`(A^\top A + \alpha I)^{-1}`.

        The residual that the steps update drifts away from the true one. Once it is small, it is computed again from
        the solution, and the steps go on from there unless it is below ``rtol`` or explained by rounding.
        """
        precondition, limits = self._preconditioner.solve, torch.finfo(vectors.dtype)
        target = self.rtol * vectors.norm(dim=1)
        x, residual = torch.zeros_like(vectors), vectors
        search = torch.zeros_like(vectors)
        energy = vectors.new_ones(len(vectors))
        active, why = residual.norm(dim=1) > target, f"after {self.max_steps} steps"
        for _ in range(self.max_steps):
            if not bool(active.any()):
                residual, active = self._left(vectors, x, alpha)
                if not bool(active.any()):
                    return x
                search, energy = torch.zeros_like(search), torch.ones_like(energy)
            z = precondition(residual, alpha)
            before, energy = energy, (residual * z).sum(1)
            search = z + (energy / before.clamp_min(limits.tiny))[:, None] * search
            image = self._product(search, alpha)
            curvature = (search * image).sum(1)
            if bool((active & ~((energy > 0) & (curvature > 0) & torch.isfinite(energy / curvature))).any()):
                why = f"where rounding in {str(vectors.dtype).removeprefix('torch.')} lets it go no further"
                break
            length = torch.where(active, energy / curvature.clamp_min(limits.tiny), 0.0)[:, None]
            x, residual = x + length * search, residual - length * image
            active = residual.norm(dim=1) > target
        residual, active = self._left(vectors, x, alpha)
        if not bool(active.any()):
            return x
        worst = float((residual.norm(dim=1) / vectors.norm(dim=1).clamp_min(limits.tiny)).max())
        message = (
            f"Conjugate gradients stopped {why} at a relative residual of {worst:.1e}, {self.rtol:.1e} was asked for: "
            "use a larger prior_precision, or more memory_limit for a direct method."
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
        return x

    def _product(self, vectors: Tensor, alpha: float) -> Tensor:  # (S, P) -> (S, P)
        return self.rows.rmv(self.rows.mv(vectors)) + alpha * vectors

    def _left(self, vectors: Tensor, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:  # (S, P), bool (S,)
        """Return the residual of a solution, and for which vectors it is larger than asked for and than rounding."""
        residual = vectors - self._product(x, alpha)
        largest = float(self._preconditioner.values.max()) if self._preconditioner.rank else 0.0
        rounding = _ROUNDING * torch.finfo(x.dtype).eps * (largest + alpha) * x.norm(dim=1)
        left = residual.norm(dim=1)
        return residual, ~((left <= self.rtol * vectors.norm(dim=1)) | (left <= rounding))
