"""The choice of a projector by rows, parameters, samples, device and memory, with its reason.

The cost model sees :class:`RowCosts <nullbayes.limits.RowCosts>` alone, and counts bytes and seconds of every method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nullbayes.errors import SettingsError
from nullbayes.limits import (
    VECTORS_PER_SAMPLE,
    Rates,
    RowCosts,
    Storage,
    compact_tile_rows,
    half_is_fast,
    limits,
    normal_bytes,
    panel_bytes,
    rates_of,
    tile_rows,
)
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.alternating import Alternating
from nullbayes.projectors.base import Projector
from nullbayes.projectors.direct import Direct, ExactDual, ExactPrimal
from nullbayes.projectors.krylov import Krylov, expected_sweeps
from nullbayes.projectors.plan import Plan
from nullbayes.projectors.sketched import Sketched
from nullbayes.projectors.sweep import gram_precision

_DIRECT = 500  # rows or columns up to which all eigenvectors are found in a moment
_CLEARLY = 1.05  # by which another storage has to be sooner than entries on the device, which are exact
_HALF_RTOL = 2e-3  # rows rounded to ten bits reach residuals of about 5e-4
_OUTPUTS, _MANY = 3, 5_000  # rows per example, and rows, from which a part of them may be a good preconditioner
_PRODUCTS = 3.0  # of halves for one of split numbers
_SPLIT = 6.0  # seconds of products of split numbers over those of halves: three products, sums and copies
_NARROW = 1.4  # `narrowness` of products with all rows in turn, without the solves of blocks in between
_SKETCH_SWEEPS, _SKETCH_PRODUCTS = 22.0, 0.65  # to 1e-2 with a share of 0.3; its products over those with all rows
_SKETCH_RTOL, _COMBINATIONS = 5e-3, (1, 2, 3, 5)  # least tolerance it was measured with; per example, to consider
_ENTRIES_RATE = 50.0  # products of halves over operations that compute entries for the tiles of a Gram matrix
_BLOCK_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 16384)  # to consider


def choose(rows: Rows, *, n_samples: int, memory_limit: int, rtol: float = 1e-2, host_limit: int = 0) -> Plan:
    """Pick the projector that reaches the tolerance soonest within the memory limit, by a count of the work.

    Parameters
    ----------
    rows : Rows
        The problem; only ``rows.costs(storage)`` is called.
    n_samples : int
        Vectors to be projected together.
    memory_limit, host_limit : int
        Bytes that may be used on the device and, if it has memory of its own, on the host.
    rtol : float
        The tolerance.

    Returns
    -------
    Plan
        The fastest plan that fits.

    Raises
    ------
    SettingsError
        If no plan fits; the message names the least limit that would do.

    Examples
    --------
    >>> import nullbayes as nb
    >>> plan = choose(nb.DenseRows(torch.eye(600, 5000)), n_samples=10, memory_limit=2**30)
    >>> plan.projector.alternating.block_rows, plan.storage
    (600, 'device')
    """
    plans = _plans(rows, n_samples, memory_limit, rtol, host_limit)
    fitting = [plan for plan in plans if plan.peak_bytes <= memory_limit]
    if fitting:
        return min(fitting, key=lambda plan: plan.seconds * (1.0 if plan.storage == "device" else _CLEARLY))
    costs = rows.costs()
    vectors = _vector_bytes(costs, n_samples)
    least = f"{math.ceil(min(plan.peak_bytes for plan in plans) / 2**20)} MiB"
    limit = f"the memory limit of {memory_limit / 2**20:.1f} MiB"
    if vectors >= memory_limit:
        msg = (
            f"{n_samples} samples of {costs.n_columns:,} parameters{_each(costs)} alone need "
            f"{vectors / 2**20:.1f} MiB, over {limit}: take fewer samples or raise memory_limit; "
            f"the least that would do is {least}."
        )
        raise SettingsError(msg)
    msg = (
        f"No block of the rows fits within {limit}; the least that would do is {least}: raise memory_limit, or use "
        "projector=nb.projectors.Lanczos(rank=...)."
    )
    raise SettingsError(msg)


def _each(costs: RowCosts) -> str:
    return " per process" if costs.column_parts > 1 else ""


def least_bytes(rows: Rows, *, n_samples: int, rtol: float = 1e-2, host_limit: int = 0) -> int:
    """Return the least memory limit that :func:`choose` has a plan for.

    Parameters
    ----------
    rows, n_samples, rtol, host_limit
        As for :func:`choose`.

    Returns
    -------
    int
        A number of bytes.

    Examples
    --------
    >>> import nullbayes as nb
    >>> rows = nb.DenseRows(torch.eye(600, 5000))
    >>> limit = least_bytes(rows, n_samples=10)
    >>> choose(rows, n_samples=10, memory_limit=limit).peak_bytes <= limit
    True
    """
    return min(plan.peak_bytes for plan in _plans(rows, n_samples, 0, rtol, host_limit))


def _vector_bytes(costs: RowCosts, n_samples: int) -> int:
    return VECTORS_PER_SAMPLE * n_samples * costs.n_columns * costs.dtype.itemsize


def _plans(rows: Rows, n_samples: int, memory_limit: int, rtol: float, host_limit: int) -> list[Plan]:
    """Return every plan, whether it fits in the limit or not; only the direct one, if it fits on the device."""
    plans: list[Plan] = []
    for storage in _storages(rows.costs(), rtol, host_limit):
        plans += _CostModel(rows.costs(storage), n_samples, memory_limit, rtol).plans()
        if isinstance(plans[0].projector, Direct) and plans[0].peak_bytes <= memory_limit:
            break  # other ways to store the rows only take longer
    return plans


def _storages(costs: RowCosts, rtol: float, host_limit: int) -> list[Storage]:
    """Return the ways to store the rows."""
    options: list[Storage] = ["device"]
    if costs.full_bytes == 0:
        return options
    if costs.dtype == torch.float32 and rtol >= _HALF_RTOL:
        options.append("half")
    if 0 < 2 * costs.compact_bytes <= costs.full_bytes and costs.processes == costs.column_parts == 1:
        options.append("factors")
    if costs.device.type == "cuda" and costs.full_bytes <= host_limit:
        options.append("host")
    return [*options, "recompute", "matrix_free"]


@dataclass(frozen=True, kw_only=True)
class _Method:
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


@dataclass(frozen=True)
class _CostModel:
    """Bytes and seconds of every method, for one way to store the rows."""

    costs: RowCosts
    n_samples: int
    memory_limit: int
    rtol: float

    @property
    def rates(self) -> Rates:
        return rates_of(self.costs.device)

    def plans(self) -> list[Plan]:
        """Return the plans of all methods, or of a direct one alone if it fits."""
        costs = self.costs
        direct = self._direct() if costs.storage not in ("matrix_free", "factors") else None
        plans = [] if direct is None else [self._plan(direct)]
        if any(plan.peak_bytes <= self.memory_limit for plan in plans):
            return plans
        plans += [self._plan(self._blocks(n)) for n in _BLOCK_COUNTS if n <= -(-costs.n_rows // costs.rows_per_example)]
        fewer = self.n_columns < self.n_rows and costs.column_parts == 1
        if fewer and costs.storage not in ("matrix_free", "half", "factors"):
            plans.append(self._plan(self._primal()))
        alone = costs.processes == costs.column_parts == 1 and costs.storage == "device" and costs.device.type == "cpu"
        many = costs.rows_per_example >= _OUTPUTS and _MANY <= costs.n_rows <= costs.n_columns
        if alone and many and self.rtol >= _SKETCH_RTOL:
            plans += [self._plan(self._sketched(n)) for n in _COMBINATIONS if 2 * n <= costs.rows_per_example]
        return plans

    @property
    def n_rows(self) -> int:
        """The rows of all processes."""
        return self.costs.all_rows or self.costs.n_rows

    @property
    def n_columns(self) -> int:
        """The columns of all processes."""
        return self.costs.all_columns or self.costs.n_columns

    @property
    def _divided(self) -> str:
        """What to say of columns that are divided."""
        if self.costs.column_parts == 1:
            return ""
        return "; the processes divide the parameters, so that Gram matrices are summed and A⊤A is never formed"

    def _direct(self) -> _Method | None:
        """Return the truncated direct method, if the problem is small."""
        costs, r, p = self.costs, self.n_rows, self.n_columns
        if r <= (min(p - 1, _DIRECT) if costs.column_parts == 1 else _DIRECT):
            gram = r * r * costs.gram_flops / 2
            flops = gram + 9.0 * r**3
            return _Method(
                projector=ExactDual(truncate=True, rtol=self.rtol),
                reason=f"{r:,} rows are few: the eigenvectors of their Gram matrix are removed, leading ones first, "
                f"until the tolerance is met{self._divided}",
                block_rows=r,
                matrix_bytes=8 * r * r,
                factoring_bytes=24 * r * r,
                prepare_flops=flops,
                prepare_seconds=flops / self.rates.single,
                sweeps=4.0,
                solve_flops=4.0 * r * r * self.n_samples + gram,
            )
        if p <= min(r, _DIRECT) and costs.column_parts == 1:
            flops = 2.0 * costs.normal_flops + 9.0 * p**3
            return _Method(
                projector=ExactPrimal(truncate=True, rtol=self.rtol),
                reason=f"only {p:,} parameters and {r:,} rows: there may be no exact null space, "
                "so the eigenvectors of A⊤A are removed, leading ones first, until the tolerance is met",
                block_rows=r,
                matrix_bytes=4 * p * p,
                factoring_bytes=36 * p * p,
                prepare_flops=flops,
                prepare_seconds=flops / self.rates.single,
                sweeps=2.0,
                solve_flops=4.0 * p * p * self.n_samples,
            )
        return None

    def _primal(self) -> _Method:
        """Return conjugate gradients over all rows in one block, by their normal matrix."""
        costs, rates, r, p = self.costs, self.rates, self.n_rows, self.n_columns
        flops = costs.normal_flops + p**3 / 3.0
        return _Method(
            projector=Krylov(Alternating(block_rows=r), rtol=self.rtol),
            reason=f"{r:,} rows are more than the {p:,} parameters, whose normal matrix fits in memory: it is factored "
            "once, and a few steps of conjugate gradients follow",
            block_rows=r,
            matrix_bytes=8 * p * p,
            factoring_bytes=normal_bytes(p, costs.device),
            prepare_flops=flops,
            prepare_seconds=flops / rates.double,
            sweeps=3.0,
            solve_flops=2.0 * p * p * self.n_samples,
            solve_seconds=max(4.0 * p * p * self.n_samples / rates.double, 16.0 * p * p / rates.bandwidth),
        )

    def _blocks(self, n: int) -> _Method:
        """Return conjugate gradients over ``n`` blocks of rows in each process."""
        costs, rates, r = self.costs, self.rates, self.costs.n_rows
        block = min(r, -(-r // (n * costs.rows_per_example)) * costs.rows_per_example)
        sweeps, half = expected_sweeps(n * costs.processes, self.rtol), costs.storage == "half"
        if costs.storage == "factors":  # a Gram matrix of as many bits will do
            half = costs.dtype == torch.float32 and self.rtol >= _HALF_RTOL
        precision = torch.float32 if half else gram_precision(costs.dtype, costs.device, block)
        factor_rate = rates.double if precision == torch.float64 else rates.single
        factors = r * block * precision.itemsize
        gram, cholesky = r * block * costs.gram_flops / 2, r * block**2 / 3.0
        by_halves = precision == torch.float32 and half_is_fast(costs.device)
        tile = min(block, tile_rows(costs.device, costs.working_bytes))
        what = f"blocks of {block:,} rows" if n * costs.processes > 1 else "one block: the direct method, refined"
        return _Method(
            projector=Krylov(
                Alternating(block_rows=block, gram_dtype=precision if half else None),
                rtol=self.rtol,
                max_sweeps=max(500, int(4 * sweeps)),
            ),
            reason=f"{self.n_rows:,} rows and {self.n_columns:,} parameters are many for eigenvectors: "
            f"conjugate gradients over {what}{self._divided}",
            block_rows=block,
            matrix_bytes=factors,
            factoring_bytes=panel_bytes(block, precision, costs.device),
            prepare_flops=gram + (_PRODUCTS * cholesky if by_halves else cholesky),
            prepare_seconds=gram / (rates.narrow if half else factor_rate)
            + (_SPLIT * cholesky / rates.narrow if by_halves else cholesky / factor_rate),
            sweeps=sweeps,
            solve_flops=2.0 * r * block * self.n_samples + r * tile * costs.gram_flops / 2,
            solve_seconds=max(4.0 * r * block * self.n_samples / factor_rate, 2.0 * factors / rates.bandwidth),
        )

    def _sketched(self, count: int) -> _Method:
        """Return conjugate gradients over all rows, preconditioned by ``count`` combinations of those per example."""
        costs, rates, share = self.costs, self.rates, count / self.costs.rows_per_example
        size = -(-costs.n_rows // costs.rows_per_example) * count
        precision = gram_precision(costs.dtype, costs.device, size)
        rate = rates.double if precision == torch.float64 else rates.single
        prepare = size**2 * costs.gram_flops / 2 + size**3 / 3.0
        solve, products = 2.0 * size**2 * self.n_samples, _SKETCH_PRODUCTS * share / 0.3 * self._products
        held = int(costs.full_bytes * share) + 4 * costs.n_rows * count
        images = 3 * costs.n_rows * self.n_samples * costs.dtype.itemsize  # products with the rows, of a step
        return _Method(
            projector=Sketched(share, rtol=self.rtol),
            reason=f"{costs.n_rows:,} rows and {costs.n_columns:,} parameters are many for eigenvectors: conjugate "
            f"gradients over all rows, preconditioned by {size:,} combinations of them",
            block_rows=max(size, min(costs.n_rows, limits(costs.device).rows_per_pass)),  # in products
            matrix_bytes=size**2 * precision.itemsize + held + images,
            factoring_bytes=max(panel_bytes(size, precision, costs.device), held),
            prepare_flops=prepare,
            prepare_seconds=prepare / rate,
            sweeps=_SKETCH_SWEEPS * (0.3 / share) ** 0.75 * (1e-2 / self.rtol) ** 0.8,
            solve_flops=solve + products,
            solve_seconds=2.0 * solve / rate + _NARROW * products / rates.single,
            narrowness=_NARROW,
        )

    def _plan(self, method: _Method) -> Plan:
        """Add the bytes and seconds of the rows to those of a method."""
        costs, rates, block = self.costs, self.rates, method.block_rows
        peak, working = self._bytes(method)
        sweep = max(method.narrowness * self._products / rates.single, 2.0 * costs.device_bytes / rates.bandwidth)
        entries = float(costs.n_rows) * costs.n_columns  # of which factors have fewer, and are formed sooner
        numbers = max(costs.full_bytes / costs.dtype.itemsize, entries / 4.0)
        forming = numbers / rates.formed + costs.forming_chunks(working) * rates.chunk
        seconds = method.prepare_seconds + method.sweeps * method.solve_seconds + forming
        if costs.storage == "half":
            sweep *= 2.0
            seconds += forming  # the final residual
        elif costs.storage == "factors":
            sweep += 6.0 * costs.full_bytes / rates.bandwidth  # entries are written and read, for both products
            tiles = -(-block // compact_tile_rows(block, costs.device, working))
            again = (tiles + 1) * costs.n_rows * costs.entry_flops  # computed again for the tiles of a Gram matrix
            rate = rates.narrow / _ENTRIES_RATE if half_is_fast(costs.device) else rates.single
            seconds += again / rate - numbers / rates.formed / 2  # which are not formed
        elif costs.storage == "host":
            sweep += costs.full_bytes / rates.transfer
        elif costs.storage == "recompute":
            block_bytes = block * self._row_bytes
            parts = 1 if block_bytes <= working // 2 else -(-4 * block_bytes // working)
            sweep += forming * (1.2 if parts == 1 else 2.2)
            seconds += forming * max(0.0, (parts - 1) / 2)
        elif costs.storage == "matrix_free":
            sweep += 4.0 * forming * self.n_samples
            seconds += forming * 2.0 * block
        return Plan(
            projector=method.projector,
            storage=costs.storage,
            reason=method.reason,
            n_rows=self.n_rows,
            n_parameters=self.n_columns,
            n_samples=self.n_samples,
            peak_bytes=peak,
            operations=method.prepare_flops + self._products + method.solve_flops,
            memory_limit=self.memory_limit,
            working_bytes=working,
            seconds=seconds + sweep * method.sweeps,
            processes=costs.processes * costs.column_parts,
            parameters_each=costs.n_columns if costs.column_parts > 1 else 0,
        )

    @property
    def _products(self) -> float:  # operations of the products of all rows with the samples, and back
        return 2.0 * self.costs.n_rows * self.n_samples * self.costs.product_flops

    @property
    def _row_bytes(self) -> int:
        return max(1, self.costs.full_bytes // self.costs.n_rows)

    def _bytes(self, method: _Method) -> tuple[int, int]:
        """Return the peak memory, and the working bytes that fit under the limit.

        Three phases follow each other: rows are formed; matrices are summed, then factored; vectors are projected.
        """
        costs, vectors, spare = self.costs, _vector_bytes(self.costs, self.n_samples), method.factoring_bytes
        on_host = method.block_rows * self._row_bytes if costs.storage == "host" else 0
        lasting = costs.device_bytes + method.matrix_bytes + on_host
        most, least = lasting + max(vectors, spare), costs.least_working_bytes(self.n_samples)
        room = self.memory_limit - most
        if room < least:
            return most + least, least
        share = self.memory_limit // 8 if costs.device.type == "cuda" else 0  # large chunks keep a GPU busy
        working = room if costs.storage == "recompute" else min(room, max(costs.working_bytes, share))
        gram, products = costs.transient_bytes(working, method.block_rows, self.n_samples)
        forming = costs.device_bytes + costs.forming_bytes(working)
        return max(forming, lasting + spare, lasting + gram, lasting + vectors + products), working
