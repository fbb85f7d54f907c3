"""What the iterative projectors cost on rows that are too many for eigenvectors, each as a :class:`Candidate`.

They read :class:`RowCosts <nullbayes.limits.RowCosts>` alone. Numbers of sweeps were measured on networks for images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nullbayes.limits import RowCosts, half_is_fast, limits, normal_bytes, panel_bytes, rates_of, tile_rows
from nullbayes.projectors.alternating import Alternating
from nullbayes.projectors.base import Projector
from nullbayes.projectors.krylov import Krylov, expected_sweeps
from nullbayes.projectors.sketched import Sketched
from nullbayes.projectors.sweep import gram_precision

DIVIDED = "; the processes divide the parameters, so that Gram matrices are summed and A⊤A is never formed"
HALF_RTOL = 2e-3  # rows rounded to ten bits reach residuals of about 5e-4
_SWEPT, _SWEPT_RTOL = 8, 5e-3  # blocks at most, and least tolerance, for which sweeps without acceleration are few
_BLOCK_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 16384)  # to consider
_PRODUCTS = 3.0  # of halves for one of split numbers
_SPLIT = 6.0  # seconds of products of split numbers over those of halves: three products, sums and copies
_NARROW = 1.4  # `narrowness` of products with all rows in turn, without the solves of blocks in between
_OUTPUTS, _MANY = 3, 5_000  # rows per example, and rows, from which a part of them may be a good preconditioner
_SKETCH_SWEEPS, _SKETCH_PRODUCTS = 22.0, 0.65  # to 1e-2 with a share of 0.3; its products over those with all rows
_SKETCH_FEWER = 0.75  # of these sweeps, times columns over rows, where that is less than all of them
_SKETCH_PASSES = 9.0  # over the rows beside those of sweeps: to prepare, and to measure samples that seem finished
_SKETCH_RTOL, _COMBINATIONS = 5e-3, (1, 2, 3, 5)  # least tolerance it was measured with; per example, to consider


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A projector with its own bytes, operations and seconds; those of the rows are counted beside them."""

    projector: Projector
    reason: str
    block_rows: int
    matrix_bytes: int  # of factors or eigenvectors, which stay
    factoring_bytes: int  # temporary, while the matrices are summed and factored
    prepare_flops: float
    prepare_seconds: float
    sweeps: float
    solve_flops: float  # per sweep, and those of tiles on a diagonal that are computed whole
    solve_seconds: float = 0.0  # per sweep
    narrowness: float = 2.4  # seconds of products of rows with the samples, over those of square matrices
    passes: float = 0.0  # over rows that are formed again, beside one per sweep; 0 for blocks, which are formed whole


def iterative_candidates(costs: RowCosts, n_samples: int, memory_limit: int, rtol: float) -> list[Candidate]:
    """Return the candidates for rows that are stored in one way; the limit only says whether these could be held."""
    counts = [n for n in _BLOCK_COUNTS if n <= -(-costs.n_rows // costs.rows_per_example)]
    found = [_conjugate(costs, n_samples, rtol, n) for n in counts]
    if costs.processes == 1 and rtol >= _SWEPT_RTOL:  # the sweeps of processes are averaged, which takes many more
        found += [_alternating(costs, n_samples, rtol, n) for n in counts if 1 < n <= _SWEPT]
    fewer = costs.whole_columns < costs.whole_rows and costs.column_parts == 1
    if fewer and costs.storage not in ("matrix_free", "half", "factors"):
        found.append(_normal(costs, n_samples, rtol))
    return found + [_sketched(costs, n_samples, rtol, n) for n in _combinations(costs, memory_limit, rtol)]


def _normal(costs: RowCosts, n_samples: int, rtol: float) -> Candidate:
    """Conjugate gradients over all rows in one block, by their normal matrix."""
    rates, r, p = rates_of(costs.device), costs.whole_rows, costs.whole_columns
    flops = costs.normal_flops + p**3 / 3.0
    return Candidate(
        projector=Krylov(Alternating(block_rows=r), rtol=rtol),
        reason=f"{r:,} rows are more than the {p:,} parameters, whose normal matrix fits in memory: it is factored "
        "once, and a few steps of conjugate gradients follow",
        block_rows=r,
        matrix_bytes=8 * p * p,
        factoring_bytes=normal_bytes(p, costs.device),
        prepare_flops=flops,
        prepare_seconds=flops / rates.double,
        sweeps=3.0,
        passes=3.0,
        solve_flops=2.0 * p * p * n_samples,
        solve_seconds=max(4.0 * p * p * n_samples / rates.double, 16.0 * p * p / rates.bandwidth),
    )


def _conjugate(costs: RowCosts, n_samples: int, rtol: float, n: int) -> Candidate:
    """Conjugate gradients over ``n`` blocks of rows in each process."""
    n_blocks = n * costs.processes
    sweeps = expected_sweeps(n_blocks, rtol)
    if n_blocks > 1 and costs.whole_rows > costs.whole_columns:
        sweeps = min(sweeps, 16.0 * (n_blocks / 2.0) ** 0.5 * (1e-2 / rtol) ** 0.6)
    return _blocks(costs, n_samples, rtol, n, sweeps=sweeps, accelerated=True)


def _alternating(costs: RowCosts, n_samples: int, rtol: float, n: int) -> Candidate:
    """One of ``n`` blocks after the other.

    Measured to a tolerance of 1e-2, on convolutional networks (on one without convolutions in brackets):

    ======================  ========  ====  ====  ====  ====  =====  ====
    rows over parameters    0.5       0.7   1.0   1.3   1.4   2.0    2.3
    ======================  ========  ====  ====  ====  ====  =====  ====
    sweeps, two blocks      31        19    16    (12)  7     8      7
    sweeps, four blocks     105       44    26    (37)  12    16     12
    ======================  ========  ====  ====  ====  ====  =====  ====
    """
    scarcity = max(1.0, 1.4 * costs.whole_columns / costs.whole_rows)
    sweeps = 7.0 * (n / 2.0) * scarcity**2 * 1e-2 / rtol
    return _blocks(costs, n_samples, rtol, n, sweeps=sweeps, accelerated=False)


def _blocks(costs: RowCosts, n_samples: int, rtol: float, n: int, *, sweeps: float, accelerated: bool) -> Candidate:
    """Return sweeps over ``n`` blocks of rows in each process, accelerated by conjugate gradients or as they are."""
    rates, r = rates_of(costs.device), costs.n_rows
    block = min(r, -(-r // (n * costs.rows_per_example)) * costs.rows_per_example)
    half = costs.storage == "half"
    if costs.storage == "factors":  # a Gram matrix of as many bits will do
        half = costs.dtype.itemsize == 4 and rtol >= HALF_RTOL
    precision = torch.float32 if half else gram_precision(costs.dtype, costs.device, block)
    factor_rate = rates.double if precision == torch.float64 else rates.single
    factors = r * block * precision.itemsize
    gram, cholesky = r * block * costs.gram_flops / 2, r * block**2 / 3.0
    by_halves = precision == torch.float32 and half_is_fast(costs.device)
    tile = min(block, tile_rows(costs.device, costs.working_bytes))
    several = f"blocks of {block:,} rows" + ("" if accelerated else ", one after the other")
    what = several if n * costs.processes > 1 else "one block: the direct method, refined"
    gram_dtype = precision if half else None
    projector: Projector
    if accelerated:
        blocks = Alternating(block_rows=block, gram_dtype=gram_dtype)
        projector = Krylov(blocks, rtol=rtol, max_sweeps=max(500, int(4 * sweeps)))
    else:
        projector = Alternating(block, rtol, max_sweeps=max(2000, int(10 * sweeps)), gram_dtype=gram_dtype)
    return Candidate(
        projector=projector,
        reason=f"{costs.whole_rows:,} rows and {costs.whole_columns:,} parameters are many for eigenvectors: "
        f"{'conjugate gradients over ' if accelerated else ''}{what}{DIVIDED if costs.column_parts > 1 else ''}",
        block_rows=block,
        matrix_bytes=factors,
        factoring_bytes=panel_bytes(block, precision, costs.device),
        prepare_flops=gram + (_PRODUCTS * cholesky if by_halves else cholesky),
        prepare_seconds=gram / (rates.narrow if half else factor_rate)
        + (_SPLIT * cholesky / rates.narrow if by_halves else cholesky / factor_rate),
        sweeps=sweeps,
        solve_flops=2.0 * r * block * n_samples + r * tile * costs.gram_flops / 2,
        solve_seconds=max(4.0 * r * block * n_samples / factor_rate, 2.0 * factors / rates.bandwidth),
    )


def _combinations(costs: RowCosts, memory_limit: int, rtol: float) -> list[int]:
    """Return how many combinations of the rows of an example are to be considered."""
    each, on_cpu = costs.rows_per_example, costs.device.type == "cpu"
    held = on_cpu and costs.storage == "device"  # a GPU factors blocks of rows that it holds about as soon
    formed_again = costs.storage == "recompute" and (on_cpu or costs.full_bytes > memory_limit)
    if not (costs.is_alone and (held or formed_again)):
        return []
    if each < _OUTPUTS or costs.n_rows < _MANY or rtol < _SKETCH_RTOL:
        return []
    return [n for n in _COMBINATIONS if 2 * n <= each and n * -(-costs.n_rows // each) < costs.n_columns]


def _sketched(costs: RowCosts, n_samples: int, rtol: float, count: int) -> Candidate:
    """Conjugate gradients over all rows, preconditioned by ``count`` combinations of those of each example.

    Where rows are more than columns, fewer sweeps suffice: 14 for as many, 8 for 1.9 times as many, where there are 20
    for half as many (to 3e-2, one combination of ten rows).
    """
    rates, share, n_rows = rates_of(costs.device), count / costs.rows_per_example, costs.n_rows
    size = -(-n_rows // costs.rows_per_example) * count
    precision = gram_precision(costs.dtype, costs.device, size)
    rate = rates.double if precision == torch.float64 else rates.single
    prepare = size**2 * costs.gram_flops / 2 + size**3 / 3.0
    solve, products = 2.0 * size**2 * n_samples, _SKETCH_PRODUCTS * share / 0.3 * costs.products(n_samples)
    stored = costs.full_bytes or sum(piece.n_bytes for piece in costs.pieces)  # which the rows hold already
    held = int(stored * share) + 4 * n_rows * count
    shared = max(0, n_rows * costs.n_columns * costs.dtype.itemsize - stored)  # by the rows of an example
    images = 3 * n_rows * n_samples * costs.dtype.itemsize  # products with the rows, of a step
    sweeps = _SKETCH_SWEEPS * (0.3 / share) ** 0.75 * (1e-2 / rtol) ** 0.8
    return Candidate(
        projector=Sketched(share, rtol=rtol),
        reason=f"{n_rows:,} rows and {costs.n_columns:,} parameters are many for eigenvectors: conjugate gradients "
        f"over all rows, preconditioned by {size:,} combinations of them",
        block_rows=max(size, min(n_rows, limits(costs.device).rows_per_pass)),  # in products
        matrix_bytes=size**2 * precision.itemsize + held + images,
        factoring_bytes=max(panel_bytes(size, precision, costs.device), min(held, shared)),
        prepare_flops=prepare,
        prepare_seconds=prepare / rate,
        sweeps=sweeps * min(1.0, _SKETCH_FEWER * costs.n_columns / n_rows),
        solve_flops=solve + products,
        solve_seconds=2.0 * solve / rate + _NARROW * products / rates.single,
        narrowness=_NARROW,
        passes=_SKETCH_PASSES,
    )
