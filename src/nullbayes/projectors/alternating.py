r"""Alternating: von Neumann's projections, block after block (the paper's Lemma 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.limits import limits
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.iteration import Carry, Iterative, Step
from nullbayes.projectors.stopping import check_least, check_noise, check_tolerance
from nullbayes.projectors.sweep import SweepState, coarse_space, dual_step, primal_step


@dataclass(frozen=True)
class Alternating(Iterative):
    r"""Project on the null space of one block of rows after the other until nothing changes.

    Cost for blocks of b rows: :math:`R\,b\,P` operations for the Gram matrices, :math:`R\,b^2/3` for their factors,
    :math:`4RPS` per sweep of S samples; memory :math:`R\,b` numbers in addition to the rows. Convergence is linear;
    small angles between blocks make it slow, larger blocks make it fast (one block is the direct method). ``Krylov``
    around it needs far fewer sweeps where rows are fewer than columns, or blocks are many. With a few blocks of more
    rows than columns, this needs few as well, and leaves more of the variance.

    Parameters
    ----------
    block_rows : int, optional
        Rows per block; by default the rows' own choice, or all of them up to 20,000.
    rtol, atol : float
        A sample is finished when ``|A v| <= max(atol, rtol * |A noise|)``, for its direction v and the rows A.
    max_sweeps : int
        The number of sweeps, passes over all rows, after which to give up: what there is comes back with a
        ``ConvergenceWarning``.
    gram_dtype : torch.dtype, optional
        Precision of the Gram matrices and factors. By default float64, but float32 for float32 rows in large blocks
        where float64 is slow (CPUs, most graphics cards); a block whose float32 factor would overshoot is factored in
        float64 all the same.
    shift : float, optional
        The least :math:`\delta` of the block steps, relative to squared row lengths: a larger one spares directions
        that the rows hardly see. By default half of ``rtol``, and never less than rounding asks for.
    coarse : int
        Dimension of a coarse space that is removed first: the leading directions of the rows, scaled to unit length,
        found by a randomized range finder. It pays with ``Krylov``, when there are many blocks and the coarse space
        holds a tenth of the rows' rank.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.Alternating(block_rows=1)
    >>> state = projector.prepare(nb.DenseRows(torch.eye(2, 3)))
    >>> projector.apply(state, torch.ones(1, 3)).directions.round(decimals=2)
    tensor([[0., 0., 1.]])
    """

    block_rows: int | None = None
    rtol: float = 1e-2
    atol: float = 0.0
    max_sweeps: int = 200
    gram_dtype: torch.dtype | None = None
    shift: float | None = None
    coarse: int = 0
    adapts = False  # a sweep is a linear map

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_least("max_sweeps", self.max_sweeps, 1)
        check_least("block_rows", 1 if self.block_rows is None else self.block_rows, 1)
        check_least("coarse", self.coarse, 0)
        if self.shift is not None and not 0.0 <= self.shift < float("inf"):
            msg = f"shift must be a number of at least 0, not {self.shift}."
            raise SettingsError(msg)

    @property
    def memory_advice(self) -> str:
        """Advise a smaller coarse space, if there is one."""
        return "lower coarse" if self.coarse else "lower n_samples"

    def block_size(self, rows: Rows) -> int:
        """Return about how many rows a block has."""
        return min(self.block_rows or rows.block_rows or limits(rows.device).block_rows, rows.n_rows)

    def smaller(self, rows: Rows) -> Alternating | None:
        """Return the same with blocks of half as many rows, or None where a block is a single example."""
        size = self.block_size(rows)
        half = max(rows.rows_per_example, size // 2)
        return replace(self, block_rows=half) if half < size else None

    def factor_blocks(self, rows: Rows, rtol: float) -> SweepState:
        """Cut the rows into blocks and factor each for a tolerance.

        All rows in one block are factored by the smaller of their two matrices; by their Gram matrix, if processes
        divide the columns.
        """
        shift = rtol / 2.0 if self.shift is None else self.shift
        size = self.block_size(rows)
        coarse = coarse_space(rows, self.coarse) if self.coarse else None
        if size == rows.n_rows > rows.n_columns == rows.n_all_columns:
            return SweepState(rows, (primal_step(rows, shift=shift, rtol=rtol),), coarse)
        steps = [dual_step(rows, *cut, precision=self.gram_dtype, shift=shift, rtol=rtol) for cut in rows.cuts(size)]
        return SweepState(rows, steps, coarse)

    def _prepare(self, rows: Rows) -> SweepState:
        return self.factor_blocks(rows, self.rtol)

    def _start(self, state: SweepState, noise: Tensor) -> Carry:
        return (noise,)

    def _step(self, state: SweepState) -> Step:
        return lambda carry, _: (carry[0] - state.sequential_sweep(carry[0]),)

    def apply_transposed(self, state: SweepState, vectors: Tensor, sweeps: int) -> Tensor:
        """Sweep backwards, as often as the samples were swept."""
        vectors = check_noise(state.rows, vectors)
        for _ in range(sweeps):
            vectors = vectors - state.sequential_sweep(vectors, backwards=True)
        return vectors
