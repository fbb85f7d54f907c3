r"""Alternating: von Neumann's projections, block after block (the paper's Lemma 4.1), and the sweep Krylov wraps.

One block step is :math:`T_b = I - B^\top (B B^\top + \delta D^2)^{-1} B`, with a shift :math:`\delta` of the size of
rounding that keeps the Cholesky factor safe. It is symmetric with eigenvalues in [0, 1] and leaves exactly the kernel
of the block unchanged, so the limit of the sweeps is the projection on the intersection of the kernels for any shift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.rows import Block, Rows
from nullbayes.linalg.spectral import GramFactor, factor_shifted
from nullbayes.projectors.base import (
    Callback,
    Projection,
    Projector,
    check_noise,
    check_sweeps,
    check_tolerance,
    conclude,
)
from nullbayes.projectors.iteration import Carry, iterate

_LOW_PRECISION_ROWS = 1_000  # larger blocks on a CPU are factored in float32 first
_LARGEST_BLOCK = 20_000  # a Gram matrix of this size takes 1.6 GB in float32


@dataclass(frozen=True)
class SweepState:
    """The rows, where they are cut, and a factor for each block."""

    rows: Rows
    cuts: tuple[tuple[int, int], ...]
    factors: tuple[GramFactor, ...]
    precision: torch.dtype

    def removed(self, vectors: Tensor, order: Iterable[int]) -> Tensor:  # (S, P) -> (S, P)
        """Return what the block steps in the given order take away; summed on its own, it has no part in the kernel."""
        total = torch.zeros_like(vectors)
        for i in order:
            block = self.rows.block(*self.cuts[i])
            total += block.rmv(self.factors[i].solve(block.mv(vectors - total)))
        return total


@dataclass(frozen=True)
class Alternating(Projector):
    r"""Project on the kernel of one block of rows after the other until nothing changes.

    Cost for blocks of b rows: :math:`R\,b\,P` operations for the Gram matrices, :math:`R\,b^2/3` for their factors,
    :math:`4RPS` a sweep of S samples; memory :math:`R\,b` numbers beside the rows. Convergence is linear; small
    angles between blocks make it slow, larger blocks make it fast (one block is the direct method). ``Krylov`` around
    it needs about a third of the sweeps.

    Parameters
    ----------
    block_rows : int, optional
        Rows a block; by default the rows' own choice, or a balance of factoring and sweeping.
    rtol, atol, max_sweeps
        The stopping sentence, and how long to try.
    gram_dtype : torch.dtype, optional
        Precision of the Gram matrices and factors. By default float64, but float32 for float32 rows in large blocks on
        a CPU, where it takes half the time; a block whose float32 factor would overshoot is factored in float64 all the
        same.
    """

    block_rows: int | None = None
    rtol: float = 1e-2
    atol: float = 0.0
    max_sweeps: int = 200
    gram_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_sweeps(self.max_sweeps)
        if self.block_rows is not None and self.block_rows < 1:
            msg = f"block_rows must be at least 1, not {self.block_rows}."
            raise SettingsError(msg)

    def prepare(self, rows: Rows) -> SweepState:
        """Cut the rows into blocks and factor the Gram matrix of each."""
        size = self.block_rows or rows.block_rows or balanced_block_rows(rows, n_samples=30)
        cuts = rows.cuts(min(size, rows.n_rows))
        largest = max(stop - start for start, stop in cuts)
        cheap = rows.dtype == torch.float32 and rows.device.type == "cpu" and largest > _LOW_PRECISION_ROWS
        precision = self.gram_dtype or (torch.float32 if cheap else torch.float64)
        factors = tuple(_factor(rows.block(*cut), rows.dtype, precision) for cut in cuts)
        precision = min((factor.scale.dtype for factor in factors), key=lambda dtype: dtype.itemsize)
        return SweepState(rows, cuts, factors, precision)

    def apply(self, state: SweepState, noise: Tensor, *, callback: Callback | None = None) -> Projection:
        """Project each row of ``noise`` (S, P)."""
        rows, order = state.rows, range(len(state.cuts))
        noise = check_noise(rows, noise)
        before = rows.norms(noise)

        def step(carry: Carry, _: int) -> Carry:
            return (carry[0] - state.removed(carry[0], order),)

        directions, after, sweeps, outcome = iterate(
            self,
            rows,
            (noise,),
            before,
            step,
            sweeps_per_step=1,
            max_sweeps=self.max_sweeps,
            callback=callback,
        )
        return conclude(
            self, rows, noise, directions, sweeps=sweeps, failure=outcome,
            precision=state.precision, norms=(after, before),
        )  # fmt: skip


def _factor(block: Block, rows_dtype: torch.dtype, precision: torch.dtype) -> GramFactor:
    """Factor a block's Gram matrix, in float64 if a lower precision makes its step overshoot."""
    factor = factor_shifted(block.gram(precision), rows_dtype)
    if precision != torch.float64 and _largest_step(block, factor, rows_dtype) > 1.01:
        factor = factor_shifted(block.gram(torch.float64), rows_dtype)
    return factor


def _largest_step(block: Block, factor: GramFactor, dtype: torch.dtype) -> float:
    """Return the largest eigenvalue of what a block step removes, by the power method; in exact arithmetic below 1."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(4, block.n_rows, generator=generator, device="cpu").to(factor.scale.device, dtype)
    size = 0.0
    for _ in range(20):
        vectors = block.mv(block.rmv(factor.solve(vectors / vectors.norm(dim=1, keepdim=True))))
        size = float(vectors.norm(dim=1).max())
    return size


def balanced_block_rows(rows: Rows, n_samples: int) -> int:
    """Return the block size b at which the factors cost about what they save in sweeps.

    The steps of conjugate gradients fall like 10 R / b (measured on small image networks, to a residual of 1e-2), so
    the work is about ``R b gram_cost / 2`` for the Gram matrices, ``R b² / 3`` for their factors and
    ``10 R / b · 4 R S product_cost`` for the sweeps.
    """
    r = rows.n_rows

    def work(b: int) -> float:
        steps = 10.0 * r / b if b < r else 2.0
        return r * b * rows_gram / 2 + r * b * b / 3 + steps * 4 * r * n_samples * rows_product

    rows_gram, rows_product = rows.gram_cost(), rows.product_cost()
    sizes: set[int] = {max(rows.granule, -(-r // n)) for n in (*range(1, 33), *(2**k for k in range(6, 21)))}
    return min((b for b in sorted(sizes) if b <= _LARGEST_BLOCK or b == rows.granule), key=work)
