"""What every form of curvature can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from nullbayes.linalg.lanczos import spectral_quadrature
from nullbayes.linalg.rows import Rows

_PROBES, _QUADRATURE_STEPS = 8, 64


class Curvature(ABC):
    r"""A positive semi-definite matrix :math:`C` (P, P).

    Attributes
    ----------
    n_columns : int
        The number of columns P.
    rank : int
        How many eigenvalues may differ from zero.
    rows : Rows or None
        The rows that each new sample multiplies with, for the forms that keep them.
    """

    n_columns: int
    rank: int
    rows: Rows | None = None

    @property
    def noise_size(self) -> int:
        """How many standard normal numbers a sample needs."""
        return self.n_columns if self.rows is None else self.n_columns + self.rows.n_rows

    @abstractmethod
    def sample(self, noise: Tensor, alpha: float) -> Tensor:  # (S, noise_size) -> (S, P)
        r"""Turn standard normal noise into samples of :math:`\mathcal N(0, (C + \alpha I)^{-1})`."""

    @abstractmethod
    def variance(self, rows: Tensor, alpha: float) -> Tensor:  # (m, P) -> (m,)
        r"""Return :math:`r^\top (C + \alpha I)^{-1} r` for each row."""

    @abstractmethod
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues with the multiplicity of each, P in all; float64, on the CPU."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what :meth:`of` builds the curvature from; nothing where that is too much to write to a file."""
        return {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the curvature from its :meth:`tensors`, which are by default the arguments of the constructor."""
        return cls(**tensors)

    def log_determinant(self, alpha: float) -> float:
        r"""Return :math:`\log\det(C + \alpha I)`."""
        values, weights = self.spectrum()
        return float((weights * torch.log(values + alpha)).sum())


def padded(values: Tensor, n_columns: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of multiplicity one, followed by a zero that stands for all remaining columns."""
    values = values.detach().to("cpu", torch.float64).flatten().clamp_min(0.0)
    weights = torch.ones_like(values)
    left = torch.tensor([float(n_columns - len(values))], dtype=torch.float64, device="cpu")
    return torch.cat([values, torch.zeros_like(left)]), torch.cat([weights, left])


def estimated_spectrum(rows: Rows, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Return nodes and weights of a stochastic quadrature, in place of the eigenvalues of :math:`A^\top A`."""
    return spectral_quadrature(rows, n_probes=_PROBES, steps=_QUADRATURE_STEPS, generator=generator)
