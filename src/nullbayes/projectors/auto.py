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
    rates_of,
)
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.candidates import DIVIDED, HALF_RTOL, Candidate, iterative_candidates
from nullbayes.projectors.direct import Direct, ExactDual, ExactPrimal
from nullbayes.projectors.krylov import Krylov
from nullbayes.projectors.plan import Plan

_DIRECT = 500  # rows or columns up to which all eigenvectors are found in a moment
_CLEARLY = 1.05  # by which another storage has to be sooner than entries on the device, which are exact
_FEW, _SOONER = 16, 2.0  # blocks, and by how much conjugate gradients over them have to be sooner; see _preference
_NETWORK = 0.3  # of the speed of products of large matrices: what a network reaches while rows are formed
_ENTRIES_RATE = 50.0  # products of halves over operations that compute entries for the tiles of a Gram matrix


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
        return min(fitting, key=_preference)
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


def _preference(plan: Plan) -> float:
    """Return the seconds of a plan, and more for one that is less exact, or keeps less of the variance.

    Conjugate gradients over a few blocks count each direction alike that a block removes. From half as many rows as
    parameters on, they leave clearly less of the variance than other methods leave at the same residual, and not what
    tells strangers: ``python -m benchmarks blocks``.
    """
    seconds = plan.seconds * (1.0 if plan.storage == "device" else _CLEARLY)
    blocks = plan.projector.alternating.block_rows if isinstance(plan.projector, Krylov) else None
    few = blocks is not None and 1 < -(-plan.n_rows // blocks) <= _FEW
    return seconds * (_SOONER if few and 2 * plan.n_rows > plan.n_parameters else 1.0)


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
    if costs.dtype == torch.float32 and rtol >= HALF_RTOL:
        options.append("half")
    if 0 < 2 * costs.compact_bytes <= costs.full_bytes and costs.is_alone:
        options.append("factors")
    if costs.device.type == "cuda" and costs.full_bytes <= host_limit:
        options.append("host")
    return [*options, "recompute", "matrix_free"]


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
        others = iterative_candidates(costs, self.n_samples, self.memory_limit, self.rtol)
        return plans + [self._plan(candidate) for candidate in others]

    def _direct(self) -> Candidate | None:
        """Return the truncated direct method, if the problem is small."""
        costs, r, p = self.costs, self.costs.whole_rows, self.costs.whole_columns
        if r <= (min(p - 1, _DIRECT) if costs.column_parts == 1 else _DIRECT):
            gram = r * r * costs.gram_flops / 2
            flops = gram + 9.0 * r**3
            return Candidate(
                projector=ExactDual(truncate=True, rtol=self.rtol),
                reason=f"{r:,} rows are few: the eigenvectors of their Gram matrix are removed, leading ones first, "
                f"until the tolerance is met{DIVIDED if costs.column_parts > 1 else ''}",
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
            return Candidate(
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

    def _plan(self, method: Candidate) -> Plan:
        """Add the bytes and seconds of the rows to those of a method."""
        costs, rates, block = self.costs, self.rates, method.block_rows
        peak, working = self._bytes(method)
        sweep = max(
            method.narrowness * costs.products(self.n_samples) / rates.single,
            2.0 * costs.device_bytes / rates.bandwidth,
        )
        entries = float(costs.n_rows) * costs.n_columns  # of which factors have fewer, and are formed sooner
        numbers = max(costs.full_bytes / costs.dtype.itemsize, entries / 4.0)
        written = numbers / rates.formed + costs.forming_chunks(working) * rates.chunk
        network = costs.n_rows / costs.rows_per_example * costs.example_flops / (_NETWORK * rates.single)
        forming = written + network
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
        elif costs.storage == "recompute" and method.passes:
            sweep += forming
            seconds += (method.passes - 1.0) * forming
        elif costs.storage == "recompute":
            block_bytes = block * self._row_bytes
            parts = 1 if block_bytes <= working // 2 else -(-4 * block_bytes // working)
            sweep += forming * (1.2 if parts == 1 else 2.2)
            seconds += forming * max(0.0, (parts - 1) / 2)
        elif costs.storage == "matrix_free":
            sweep += 4.0 * written * self.n_samples
            seconds += written * 2.0 * block
        return Plan(
            projector=method.projector,
            storage=costs.storage,
            reason=method.reason,
            n_rows=costs.whole_rows,
            n_parameters=costs.whole_columns,
            n_samples=self.n_samples,
            peak_bytes=peak,
            operations=method.prepare_flops + costs.products(self.n_samples) + method.solve_flops,
            memory_limit=self.memory_limit,
            working_bytes=working,
            seconds=seconds + sweep * method.sweeps,
            processes=costs.processes * costs.column_parts,
            parameters_each=costs.n_columns if costs.column_parts > 1 else 0,
        )

    @property
    def _row_bytes(self) -> int:
        return max(1, self.costs.full_bytes // self.costs.n_rows)

    def _bytes(self, method: Candidate) -> tuple[int, int]:
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
