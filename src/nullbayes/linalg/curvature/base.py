r"""What every curvature can do."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Curvature(ABC):
    r"""A positive semi-definite matrix :math:`C` (P, P), in one form or another.

    Attributes
    ----------
    n_columns : int
        P.
    rank : int
        How many eigenvalues may differ from zero.
    noise_size : int
        Standard normal numbers that a sample needs.
    """

    n_columns: int
    rank: int

    @property
    def noise_size(self) -> int:
        """Standard normal numbers that a sample needs."""
        return self.n_columns

    @abstractmethod
    def sample(self, noise: Tensor, alpha: float) -> Tensor:  # (S, noise_size) -> (S, P)
        r"""Turn standard normal noise into samples of :math:`\mathcal N(0, (C + \alpha I)^{-1})`."""

    @abstractmethod
    def variance(self, rows: Tensor, alpha: float) -> Tensor:  # (m, P) -> (m,)
        r"""Return :math:`r^\top (C + \alpha I)^{-1} r` for each row."""

    @abstractmethod
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and how often each counts, P in all; float64, on the CPU."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what the curvature can be built from again; nothing where that is too much to write to a file."""
        return {}

    def log_determinant(self, alpha: float) -> float:
        r"""Return :math:`\log\det(C + \alpha I)`."""
        values, weights = self.spectrum()
        return float((weights * torch.log(values + alpha)).sum())


def padded(values: Tensor, n_columns: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues with their weights, and zero for as many columns as are left."""
    values = values.detach().to("cpu", torch.float64).flatten().clamp_min(0.0)
    weights = torch.ones_like(values)
    left = torch.tensor([float(n_columns - len(values))], dtype=torch.float64, device="cpu")
    return torch.cat([values, torch.zeros_like(left)]), torch.cat([weights, left])
