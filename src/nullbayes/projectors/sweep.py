r"""What a sweep consists of: steps that each remove something from vectors, and never from the common null space.

The step of a block :math:`B` with row lengths :math:`D` is :math:`v \mapsto B^\top (B B^\top + \delta D^2)^{-1} B v`, a
symmetric map with eigenvalues in [0, 1) that vanishes exactly on the null space of :math:`B`, for any
:math:`\delta > 0`. A coarse space of leading directions of the rows may be removed before the blocks are swept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.limits import double_is_fast
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Block, Rows
from nullbayes.linalg.spectral import (
    CholeskyFactor,
    NormalFactor,
    eigh,
    factor_normal,
    factor_shifted,
    largest_growth,
    least_shift,
)

_LOW_PRECISION_ROWS = 1_000  # from here on float32 factors of float32 rows pay where float64 is slow
_SAFE_SHIFT = 4.0  # times what rounding asks for: no float32 factor was seen to overshoot from there on
_PASSES = 2  # power iterations of the range finder, after its first pass over the rows
_SPARE = 10  # random vectors of the range finder beyond the directions that it looks for


@dataclass(frozen=True)
class DualStep:
    """The step of a block with fewer rows than columns, by the factor of its Gram matrix."""

    block: Callable[[], Block]
    factor: CholeskyFactor
    leak: float = 0.0  # relative error that rounding introduces inside the null space, beyond that of the correction

    @property
    def precision(self) -> torch.dtype:
        """In which the factor was computed."""
        return self.factor.scale.dtype

    def correction(self, vectors: Tensor) -> Tensor:
        """Return ``B.T (B B.T + δ D²)⁻¹ B v``, which has no part in the null space."""
        block = self.block()
        return block.rmv(self.factor.solve(block.mv(vectors)))

    def remainder(self, vectors: Tensor) -> Tensor:
        """Return what the step leaves."""
        return vectors - self.correction(vectors)


Step = DualStep | NormalFactor  # the latter is the step of all rows, where they are more than the columns


def dual_step(
    rows: Rows, start: int, stop: int, *, precision: torch.dtype | None, shift: float, rtol: float = 0.0
) -> DualStep:
    """Factor the Gram matrix of a block, in float64 if a lower precision makes its step overshoot.

    ``rtol`` is the tolerance at which short rows are spared, if the rows allow that.
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


def primal_step(rows: Rows, *, shift: float, rtol: float = 0.0) -> NormalFactor:
    """Sum and factor the normal matrix of all rows, each scaled to unit length unless it is spared."""
    scale = rows.unit_scale(rtol)
    return factor_normal(lambda: normal_matrix(rows, scale), rows.dtype, shift)


def gram_precision(rows_dtype: torch.dtype, device: torch.device, size: int) -> torch.dtype:
    """Return the precision of a Gram matrix: float64 where it is cheap, or where the rows have it."""
    cheap = size <= _LOW_PRECISION_ROWS or double_is_fast(device)
    return torch.float64 if cheap or rows_dtype == torch.float64 else torch.float32


def _overshoots(step: DualStep, rows: Rows) -> bool:
    """Return whether the step removes more than there is: an eigenvalue above 1, found by the power method."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.randn(4, len(step.factor.scale), generator=generator, device="cpu").to(rows.device, rows.dtype)
    first = step.block().rmv(step.factor.solve(start))
    return largest_growth(step.correction, first, steps=10, length=rows.vector_lengths) > 1.01


@dataclass(frozen=True)
class Coarse:
    """An orthonormal basis of directions in the row space."""

    basis: Tensor  # (r, P)

    def correction(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return the part of each vector inside the space."""
        return (vectors @ self.basis.T) @ self.basis


def coarse_space(rows: Rows, dimension: int) -> Coarse:
    r"""Find leading directions of the rows, each scaled to unit length, by a randomized range finder.

    It multiplies random vectors with :math:`\tilde A^\top \tilde A` and orthonormalizes them between passes: the basis
    lies in the row space, so removing it never touches the null space. Directions that may be rounding are left out:
    there are never more than the rank.
    """
    rows.check_whole("A coarse space (coarse=...)")
    size = min(dimension, rows.n_rows, rows.n_columns)
    generator = torch.Generator(device="cpu").manual_seed(0x636F61)
    start = torch.randn(min(size + _SPARE, rows.n_columns), rows.n_columns, generator=generator, device="cpu")
    basis = start.to(rows.device, rows.dtype)
    scale = rows.unit_scale().to(rows.dtype)
    for _ in range(1 + _PASSES):
        image = torch.zeros_like(basis)
        for where, block in rows.blocks(rows.rows_per_pass):
            image += block.rmv(block.mv(basis) * scale[where] * scale[where])  # its square may overflow
        basis = torch.linalg.qr(rows.total(image).T)[0].T
    inner = torch.zeros(len(basis), len(basis), dtype=torch.float64, device=rows.device)
    for where, block in rows.blocks(rows.rows_per_pass):
        part = block.mv(basis).double() * scale[where]
        inner += part @ part.T
    eigenvalues, leading = eigh(rows.total(inner))
    seen = eigenvalues > len(basis) * torch.finfo(rows.dtype).eps * eigenvalues[-1]
    leading = leading[:, seen][:, -size:].to(rows.dtype)
    return Coarse((leading.T @ basis).contiguous())


@dataclass(frozen=True)
class SweepState:
    """The rows, and the steps of a sweep over those of their blocks that this process has."""

    rows: Rows
    steps: Sequence[Step]
    coarse: Coarse | None

    @property
    def precision(self) -> torch.dtype:
        """The lowest precision of the factors."""
        each = (step.precision for step in self.steps)
        return min(each, key=lambda dtype: dtype.itemsize, default=self.rows.dtype)

    @property
    def is_joint(self) -> bool:
        """Whether one step is that of all rows, also of those that other processes have."""
        return len(self.steps) == 1 and (self.rows.row_group.size == 1 or isinstance(self.steps[0], NormalFactor))

    def sequential_sweep(self, vectors: Tensor, *, backwards: bool = False) -> Tensor:  # (S, P) -> (S, P)
        """Return what all steps remove, each from what those before have left; backwards, the transposed map.

        Where rows are spread over processes, each sweeps over its own, and the results are averaged (Gordon and Gordon
        2010): the vectors that stay as they are still make up the common null space.
        """
        steps: list[Coarse | Step] = [*self.steps] if self.coarse is None else [self.coarse, *self.steps]
        total = torch.zeros_like(vectors)
        for step in reversed(steps) if backwards else steps:
            total += step.correction(vectors - total)
        return total if self.is_joint else self.rows.total(total) / self.rows.row_group.size

    def parallel_sweep(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return the sum of what each step removes from the same vectors.

        This is a symmetric positive semi-definite map that vanishes exactly on the common null space. On the coarse
        space it is the identity, on its complement the sum of the steps.
        """
        if self.coarse is None:
            return self._sum(vectors)
        inside = self.coarse.correction(vectors)
        beside = self._sum(vectors - inside)
        return inside + beside - self.coarse.correction(beside)

    def _sum(self, vectors: Tensor) -> Tensor:
        total = self.steps[0].correction(vectors) if self.steps else torch.zeros_like(vectors)
        for step in self.steps[1:]:
            total += step.correction(vectors)
        return total if self.is_joint else self.rows.total(total)
