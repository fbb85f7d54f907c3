r"""Alternating: von Neumann's projections, block after block (the paper's Lemma 4.1), and the sweep Krylov wraps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.base import (
    Callback,
    Iterative,
    Leader,
    Projection,
    Store,
    check_noise,
    check_sweeps,
    check_tolerance,
    conclude,
)
from nullbayes.projectors.coarse import Coarse, coarse_space
from nullbayes.projectors.iteration import Carry, iterate
from nullbayes.projectors.steps import Step, dual_step, primal_step

_LARGEST_BLOCK = 20_000  # rows, when nobody says how much memory there is


@dataclass(frozen=True)
class SweepState:
    """The rows, and what a sweep over them consists of."""

    rows: Rows
    steps: Sequence[Step]
    coarse: Coarse | None

    @property
    def precision(self) -> torch.dtype:
        """The lowest precision of the factors."""
        return min((step.precision for step in self.steps), key=lambda dtype: dtype.itemsize)

    def one_by_one(self, vectors: Tensor, *, backwards: bool = False) -> Tensor:  # (S, P) -> (S, P)
        """Return what all steps take away, each from what the ones before have left; backwards, the transpose."""
        steps: list[Coarse | Step] = [*self.steps] if self.coarse is None else [self.coarse, *self.steps]
        total = torch.zeros_like(vectors)
        for step in reversed(steps) if backwards else steps:
            total += step.removed(vectors - total)
        return total

    def all_at_once(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Return the sum of what each step takes away from the same vectors, the coarse space apart.

        A symmetric positive semi-definite map that vanishes exactly on the common kernel. On the coarse space it is the
        identity, beside it the sum of the steps.
        """
        if self.coarse is None:
            return self._summed(vectors)
        inside = self.coarse.removed(vectors)
        beside = self._summed(vectors - inside)
        return inside + beside - self.coarse.removed(beside)

    def _summed(self, vectors: Tensor) -> Tensor:
        total = self.steps[0].removed(vectors)
        for step in self.steps[1:]:
            total += step.removed(vectors)
        return total


@dataclass(frozen=True)
class Alternating(Iterative):
    r"""Project on the kernel of one block of rows after the other until nothing changes.

    Cost for blocks of b rows: :math:`R\,b\,P` operations for the Gram matrices, :math:`R\,b^2/3` for their factors,
    :math:`4RPS` a sweep of S samples; memory :math:`R\,b` numbers beside the rows. Convergence is linear; small
    angles between blocks make it slow, larger blocks make it fast (one block is the direct method). ``Krylov`` around
    it needs far fewer sweeps.

    Parameters
    ----------
    block_rows : int, optional
        Rows a block; by default the rows' own choice, or all of them up to 20,000.
    rtol, atol, max_sweeps
        The stopping sentence, and how long to try.
    gram_dtype : torch.dtype, optional
        Precision of the Gram matrices and factors. By default float64, but float32 for float32 rows in large blocks
        where float64 is slow (CPUs, most graphics cards); a block whose float32 factor would overshoot is factored in
        float64 all the same.
    shift : float, optional
        The least :math:`\delta` of the block steps, relative to squared row lengths: a larger one spares directions
        that the rows hardly see. By default half of ``rtol``, and never less than rounding asks for.
    coarse : int
        Dimension of a coarse space that is taken out first: the leading directions of the rows, scaled to unit length,
        found by a randomized range finder. Pays with ``Krylov``, when the blocks are many and a tenth of the rows' rank
        fits in it.
    """

    block_rows: int | None = None
    rtol: float = 1e-2
    atol: float = 0.0
    max_sweeps: int = 200
    gram_dtype: torch.dtype | None = None
    shift: float | None = None
    coarse: int = 0

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_sweeps(self.max_sweeps)
        if self.block_rows is not None and self.block_rows < 1:
            msg = f"block_rows must be at least 1, not {self.block_rows}."
            raise SettingsError(msg)
        if self.shift is not None and not 0.0 <= self.shift < float("inf"):
            msg = f"shift must be a number of at least 0, not {self.shift}."
            raise SettingsError(msg)
        if self.coarse < 0:
            msg = f"coarse must be at least 0, not {self.coarse}."
            raise SettingsError(msg)

    def prepare(self, rows: Rows) -> SweepState:
        """Cut the rows into blocks and factor each; all rows in one block go by the smaller of the two matrices."""
        return self.prepare_for(rows, self.rtol)

    def prepare_for(self, rows: Rows, rtol: float) -> SweepState:
        """Prepare for another tolerance than one's own."""
        shift = rtol / 2.0 if self.shift is None else self.shift
        size = self.block_size(rows)
        coarse = coarse_space(rows, self.coarse) if self.coarse else None
        if size == rows.n_rows > rows.n_columns:
            return SweepState(rows, (primal_step(rows, shift=shift, rtol=rtol),), coarse)
        steps = [dual_step(rows, *cut, precision=self.gram_dtype, shift=shift, rtol=rtol) for cut in rows.cuts(size)]
        return SweepState(rows, steps, coarse)

    @property
    def memory_advice(self) -> str:
        """Advise a smaller coarse space, if there is one."""
        return "lower coarse" if self.coarse else "lower n_samples"

    def block_size(self, rows: Rows) -> int:
        """Return about how many rows a block has."""
        return min(self.block_rows or rows.block_rows or _LARGEST_BLOCK, rows.n_rows)

    def smaller(self, rows: Rows) -> Alternating | None:
        """Return the same with blocks of half as many rows, or None where a block is a single example."""
        size = self.block_size(rows)
        half = max(rows.granule, size // 2)
        return replace(self, block_rows=half) if half < size else None

    def apply(
        self, state: SweepState, noise: Tensor, *, callback: Callback | None = None, store: Store | None = None
    ) -> Projection:
        """Project each row of ``noise`` (S, P)."""
        rows = state.rows
        noise = check_noise(rows, noise)
        before = rows.norms(noise)

        def step(carry: Carry, _: int) -> Carry:
            return (carry[0] - state.one_by_one(carry[0]),)

        directions, after, sweeps, outcome = iterate(
            self, rows, (noise,), before, step,
            sweeps_per_step=1, max_sweeps=self.max_sweeps, callback=callback, store=store,
        )  # fmt: skip
        return conclude(
            self, rows, noise, directions, sweeps=sweeps, failure=outcome,
            precision=state.precision, norms=(after, before),
        )  # fmt: skip

    def follow(self, state: SweepState, leader: Leader, vectors: Tensor) -> Tensor:
        """Sweep backwards, as often as the leader."""
        vectors = check_noise(state.rows, vectors)
        for _ in range(leader.sweeps):
            vectors = vectors - state.one_by_one(vectors, backwards=True)
        return vectors
