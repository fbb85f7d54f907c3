r"""What a sweep consists of: steps that each take something away from vectors, never from the common kernel.

The step of a block :math:`B` with row lengths :math:`D` is :math:`v \mapsto B^\top (B B^\top + \delta D^2)^{-1} B v`, a
symmetric map with eigenvalues in [0, 1) that vanishes exactly on the kernel of :math:`B`, for any :math:`\delta > 0`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.limits import double_is_fast
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Block, Rows
from nullbayes.linalg.spectral import (
    CholeskyFactor,
    NormalFactor,
    factor_normal,
    factor_shifted,
    largest_growth,
    least_shift,
)

_LOW_PRECISION_ROWS = 1_000  # from here on float32 factors of float32 rows pay where float64 is slow
_SAFE_SHIFT = 4.0  # times what rounding asks for: no float32 factor was seen to overshoot from there on


class Step(ABC):
    """One step of a sweep."""

    precision: torch.dtype
    leak: float = 0.0  # part of a vector in the kernel that rounding takes away, beyond that of what is taken

    @abstractmethod
    def removed(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return what the step takes away; it has no part in the kernel."""


@dataclass(frozen=True)
class DualStep(Step):
    """The step of a block with fewer rows than columns: by the factor of its Gram matrix."""

    block: Callable[[], Block]
    factor: CholeskyFactor

    @property
    def precision(self) -> torch.dtype:  # type: ignore[override]
        """In which the factor was computed."""
        return self.factor.scale.dtype

    def removed(self, vectors: Tensor) -> Tensor:
        """Return ``B.T (B B.T + δ D²)⁻¹ B v``."""
        block = self.block()
        return block.rmv(self.factor.solve(block.mv(vectors)))


@dataclass(frozen=True)
class PrimalStep(Step):
    """The step of all rows, when they are more than the columns: by the factor of their normal matrix."""

    factor: NormalFactor
    precision: torch.dtype = torch.float64

    @property
    def leak(self) -> float:  # type: ignore[override]
        """Of solving with the factor."""
        return self.factor.leak

    def removed(self, vectors: Tensor) -> Tensor:
        """Return the same by the identity of Woodbury, without a look at the rows."""
        return self.factor.removed(vectors)


def dual_step(
    rows: Rows, start: int, stop: int, *, precision: torch.dtype | None, shift: float, rtol: float = 0.0
) -> DualStep:
    """Factor the Gram matrix of a block, in float64 if a lower precision makes its step overshoot.

    ``rtol`` is the tolerance at which short rows are spared, where the rows say that they may be.
    """
    spared = rows.spared(rtol)
    chosen = precision or gram_precision(rows.dtype, rows.device, stop - start)

    def block() -> Block:
        return rows.block(start, stop)

    step = DualStep(block, factor_shifted(lambda: block().gram(chosen), rows.dtype, shift, spared))
    safe = step.factor.shift > _SAFE_SHIFT * least_shift(stop - start, rows.dtype, chosen)
    if chosen != torch.float64 and not safe and _overshoots(step, rows):
        step = DualStep(block, factor_shifted(lambda: block().gram(torch.float64), rows.dtype, shift, spared))
    return step


def primal_step(rows: Rows, *, shift: float, rtol: float = 0.0) -> PrimalStep:
    """Sum and factor the normal matrix of all rows, each scaled to unit length unless it is spared."""
    scale = rows.unit_scale(rtol)
    return PrimalStep(factor_normal(lambda: normal_matrix(rows, scale), rows.dtype, shift))


def gram_precision(rows_dtype: torch.dtype, device: torch.device, size: int) -> torch.dtype:
    """Return the precision of a Gram matrix: float64 where it is cheap, or where the rows have it."""
    cheap = size <= _LOW_PRECISION_ROWS or double_is_fast(device)
    return torch.float64 if cheap or rows_dtype == torch.float64 else torch.float32


def _overshoots(step: DualStep, rows: Rows) -> bool:
    """Return whether the step takes away more than there is: an eigenvalue above 1, found by the power method."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(4, len(step.factor.scale), generator=generator, device="cpu").to(rows.device, rows.dtype)
    return largest_growth(step.removed, step.block().rmv(step.factor.solve(start)), steps=10) > 1.01
