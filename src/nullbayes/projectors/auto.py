"""The choice of a projector by rows, parameters, samples, device and memory, with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nullbayes.errors import SettingsError
from nullbayes.linalg.cholesky import panel_bytes
from nullbayes.linalg.normal import normal_bytes
from nullbayes.linalg.pieces import tile_rows
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.alternating import Alternating
from nullbayes.projectors.base import Projector
from nullbayes.projectors.dual import ExactDual
from nullbayes.projectors.krylov import Krylov
from nullbayes.projectors.primal import ExactPrimal
from nullbayes.projectors.steps import double_is_fast, gram_precision
from nullbayes.types import Storage

_DIRECT = 500  # rows or columns up to which all eigenvectors are found in a moment
_HALF_RTOL = 2e-3  # rows rounded to ten bits reach residuals of about 5e-4
_VECTORS = 10  # for each sample: the noise, the directions, and what a step of conjugate gradients has in memory
_GRANULES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 16384)  # blocks to consider


@dataclass(frozen=True)
class Rates:
    """What a device does in a second; only ratios matter, and they were measured on one machine of each kind."""

    single: float  # operations of float32 matrix products
    double: float
    narrow: float  # of products of ten-bit numbers
    bandwidth: float  # bytes
    transfer: float  # bytes from the host
    formed: float  # entries of Jacobian rows
    chunk: float  # seconds that a chunk of rows takes to form, however small


_CPU = Rates(1.5e11, 0.75e11, 1.5e11, 2e10, 2e10, 1e9, 3e-3)
_ONE_THREAD = Rates(0.75e11, 0.375e11, 0.75e11, 1e10, 1e10, 0.5e9, 6e-3)
_CUDA = Rates(4.5e13, 4e13, 3e14, 3e12, 2e10, 2e10, 4e-2)
_CUDA_SINGLE = Rates(2e13, 4e11, 6e13, 8e11, 1e10, 1e10, 4e-2)  # cards whose float64 is slow


@dataclass(frozen=True)
class Plan:
    """What a fit would do, and why.

    Attributes
    ----------
    projector : Projector
        The method, with its settings.
    storage : "device", "half", "host", "form" or "products"
        Where the rows are: held on the device, held there in half precision (the final residual is measured on rows
        formed anew), held in host memory, formed again in every sweep, or never formed: products by JVP and VJP.
    reason : str
        One sentence.
    n_rows, n_parameters, n_samples : int
        The problem.
    peak_bytes : int
        Estimated need beside the model and the data.
    operations : float
        Floating-point operations of matrix products and factorizations, to prepare and for one sweep: Gram or normal
        matrices, Cholesky factors or eigenvectors, products of all rows with the samples and back, solves. What the
        network computes to form rows is not counted.
    memory_limit : int
        What it was planned for.
    working_bytes : int
        What of it rows may take for a moment while they are formed and multiplied.
    seconds : float
        Estimated time. What :func:`choose` returns counts the projection alone; ``nb.plan`` adds the trial that finds
        a precision, and half a second for all else.
    note : str
        What the plan was not sure of; empty if there is no such thing.
    """

    projector: Projector
    storage: Storage
    reason: str
    n_rows: int
    n_parameters: int
    n_samples: int
    peak_bytes: int
    operations: float
    memory_limit: int
    working_bytes: int
    seconds: float
    note: str = ""

    def to_dict(self) -> dict[str, str | int | float]:
        """Return the plan as plain numbers and strings, ready for JSON; the projector as it prints."""
        return {**vars(self), "projector": str(self.projector)}

    def __str__(self) -> str:
        """Describe the plan in a few lines."""
        rows = {
            "device": "held in memory",
            "half": "held in half precision; the final residual is measured in full",
            "host": "held in host memory, brought to the device block by block",
            "form": "formed again, block by block, in every sweep",
            "products": "never formed: products by JVP and VJP",
        }[self.storage]
        return (
            f"{self.n_rows:,} rows over {self.n_parameters:,} parameters, {self.n_samples} samples\n"
            f"  projector  {self.projector}\n  because    {self.reason}\n  rows       {rows}\n"
            f"  memory     {self.peak_bytes / 2**30:.2f} GiB of {self.memory_limit / 2**30:.2f}\n"
            f"  work       {self.operations:.2g} operations to prepare and sweep once\n"
            f"  time       {_in_words(self.seconds)}, a rough estimate"
            + (f"\n  note       {self.note}" if self.note else "")
        )


def _in_words(seconds: float) -> str:
    """Say how long something takes, as one says it."""
    if seconds < 1.0:
        return "less than a second"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.2g} {unit}"
    return f"about {seconds:.0f} s"


def choose(rows: Rows, *, n_samples: int, memory_limit: int, rtol: float = 1e-2, host_limit: int = 0) -> Plan:
    """Pick the projector that reaches the tolerance soonest within the memory limit, by a count of the work.

    Parameters
    ----------
    rows : Rows
        The problem.
    n_samples : int
        Vectors to be projected together.
    memory_limit, host_limit : int
        Bytes that may be used on the device, and, where that is another place, of host memory.
    rtol : float
        The tolerance.
    """
    vectors = _vector_bytes(rows, n_samples)
    plans = _plans(rows, n_samples, memory_limit, rtol, host_limit)
    fitting = [plan for plan in plans if plan.peak_bytes <= memory_limit]
    if not fitting:
        least = f"{math.ceil(min(plan.peak_bytes for plan in plans) / 2**20)} MiB"
        limit = f"the memory limit of {memory_limit / 2**20:.1f} MiB"
        if vectors >= memory_limit:
            msg = (
                f"{n_samples} samples of {rows.n_columns:,} parameters alone need {vectors / 2**20:.1f} MiB, over "
                f"{limit}: take fewer samples or raise memory_limit; the least that would do is {least}."
            )
            raise SettingsError(msg)
        msg = (
            f"No block of the rows fits within {limit}; the least that would do is {least}: raise memory_limit, or use "
            "projector=nb.projectors.Lanczos(rank=...)."
        )
        raise SettingsError(msg)
    return min(fitting, key=lambda plan: plan.seconds)


def least_bytes(rows: Rows, *, n_samples: int, rtol: float = 1e-2, host_limit: int = 0) -> int:
    """Return the least memory limit that :func:`choose` has a plan for."""
    return min(plan.peak_bytes for plan in _plans(rows, n_samples, 0, rtol, host_limit))


def _vector_bytes(rows: Rows, n_samples: int) -> int:
    return _VECTORS * n_samples * rows.n_columns * rows.dtype.itemsize


def _plans(rows: Rows, n_samples: int, memory_limit: int, rtol: float, host_limit: int) -> list[Plan]:
    """Return all that could be done, within the limit or not."""
    vectors = _vector_bytes(rows, n_samples)
    return [
        plan
        for storage in _storages(rows, rtol, host_limit)
        for plan in _Counter(rows, n_samples, memory_limit, rtol, storage, vectors).plans()
    ]


def _steps(n_blocks: int, rtol: float) -> float:
    """Return how many sweeps conjugate gradients are likely to need.

    Measured on rows of LeNet (400 to 2,000 images) and ResNet-20 (15,000), to residuals of 1e-2 and 1.5e-3: 4 for one
    block, 26 to 45 for two, 44 to 86 for three, 170 for ten, 280 for sixty.
    """
    n = float(n_blocks)
    return 6.0 if n == 1 else min(25.0 * n**0.8, 80.0 * n**0.3) * (1e-2 / rtol) ** 0.75


def _storages(rows: Rows, rtol: float, host_limit: int) -> list[Storage]:
    """Return where the rows may be."""
    if rows.kept_bytes() == 0:
        return ["device"]
    options: list[Storage] = ["device"]
    if rows.dtype == torch.float32 and rtol >= _HALF_RTOL:
        options.append("half")
    if rows.device.type == "cuda" and rows.kept_bytes() <= host_limit:
        options.append("host")
    return [*options, "form", "products"]


class _Counter:
    """Counts bytes and operations of the ways to project, for one way to store the rows."""

    def __init__(
        self, rows: Rows, n_samples: int, memory_limit: int, rtol: float, storage: Storage, vectors: int
    ) -> None:
        self.rows, self.samples, self.limit, self.rtol = rows, n_samples, memory_limit, rtol
        self.storage, self.vectors = storage, vectors
        self.rates = _CPU
        if rows.device.type == "cuda":
            self.rates = _CUDA if double_is_fast(rows.device) else _CUDA_SINGLE
        elif torch.get_num_threads() == 1:
            self.rates = _ONE_THREAD
        whole = rows.kept_bytes()
        self.row_bytes = max(1, whole // rows.n_rows)
        self.held = {"device": whole, "half": rows.kept_bytes(half=True) if storage == "half" else 0}.get(storage, 0)
        self.entries = float(rows.n_rows) * rows.n_columns

    def plans(self) -> list[Plan]:
        """Return what could be done."""
        r, p = self.rows.n_rows, self.rows.n_columns
        direct = self._direct() if self.storage != "products" else []
        if any(plan.peak_bytes <= self.limit for plan in direct):
            return direct
        plans = direct + [self._blocks(n) for n in _GRANULES if n <= -(-r // self.rows.granule)]
        if r > p and self.storage not in ("products", "half"):
            plans.append(self._primal())
        return plans

    def _direct(self) -> list[Plan]:
        """Return the truncated direct method, if the problem is small."""
        r, p = self.rows.n_rows, self.rows.n_columns
        if r <= min(p - 1, _DIRECT):
            why = (
                f"{r:,} rows are few: the eigenvectors of their Gram matrix are removed, leading ones first, "
                "until the tolerance is met"
            )
            work = r * r * self.rows.gram_cost() / 2 + 9.0 * r**3
            beside = 4.0 * r * r * self.samples + r * r * self.rows.gram_cost() / 2
            dual = ExactDual(truncate=True, rtol=self.rtol)
            return [self._plan(dual, why, 8 * r * r, work, spare=24 * r * r, sweeps=4.0, beside=beside)]
        if p <= min(r, _DIRECT):
            why = (
                f"only {p:,} parameters and {r:,} rows: there may be no exact kernel, "
                "so the eigenvectors of A⊤A are removed, leading ones first, until the tolerance is met"
            )
            work = 2.0 * self.rows.normal_cost() + 9.0 * p**3
            beside = 4.0 * p * p * self.samples
            primal = ExactPrimal(truncate=True, rtol=self.rtol)
            return [self._plan(primal, why, 4 * p * p, work, spare=36 * p * p, sweeps=2.0, beside=beside)]
        return []

    def _primal(self) -> Plan:
        """Return conjugate gradients over all rows in one block, by their normal matrix."""
        r, p = self.rows.n_rows, self.rows.n_columns
        why = (
            f"{r:,} rows are more than the {p:,} parameters, whose normal matrix fits in memory: it is factored once, "
            "and a few steps of conjugate gradients follow"
        )
        work = self.rows.normal_cost() + p**3 / 3.0
        solve = max(4.0 * p * p * self.samples / self.rates.double, 16.0 * p * p / self.rates.bandwidth)
        projector = Krylov(Alternating(block_rows=r), rtol=self.rtol)
        return self._plan(
            projector, why, 8 * p * p, work, spare=normal_bytes(p, self.rows.device), sweeps=3.0, extra=3.0 * solve,
            double=True, beside=2.0 * p * p * self.samples,
        )  # fmt: skip

    def _blocks(self, n: int) -> Plan:
        """Return conjugate gradients over ``n`` blocks of rows."""
        rows, granule = self.rows, self.rows.granule
        r = rows.n_rows
        block = min(r, -(-r // (n * granule)) * granule)
        steps = _steps(n, self.rtol)
        precision = torch.float32 if self.storage == "half" else gram_precision(rows, block)
        double = precision == torch.float64
        factors = r * block * precision.itemsize
        tile = min(block, tile_rows(rows.device, rows.working_bytes))
        rate = self.rates.narrow if self.storage == "half" else self.rates.double if double else self.rates.single
        solid = self.rates.double if double else self.rates.single
        gram, cholesky = r * block * rows.gram_cost() / 2, r * block**2 / 3.0
        solves = max(4.0 * r * block * self.samples / solid, 2.0 * factors / self.rates.bandwidth)
        what = "one block: the direct method, refined" if n == 1 else f"blocks of {block:,} rows"
        why = f"{r:,} rows and {rows.n_columns:,} parameters are many for eigenvectors: conjugate gradients over {what}"
        projector = Krylov(
            Alternating(block_rows=block, gram_dtype=precision if self.storage == "half" else None),
            rtol=self.rtol,
            max_sweeps=max(500, int(4 * steps)),
        )
        return self._plan(
            projector, why, factors, gram + cholesky, spare=panel_bytes(block, precision, rows.device), sweeps=steps,
            block=block, beside=2.0 * r * block * self.samples + r * tile * rows.gram_cost() / 2,
            extra=steps * solves + gram / rate + cholesky / solid - (gram + cholesky) / self.rates.single,
        )  # fmt: skip

    def _plan(
        self,
        projector: Projector,
        why: str,
        matrices: int,
        work: float,
        *,
        spare: int,
        sweeps: float,
        beside: float,
        block: int | None = None,
        extra: float = 0.0,
        double: bool = False,
    ) -> Plan:
        """Complete a plan: ``matrices`` bytes beside the rows, ``work`` to prepare, ``extra`` seconds of their own.

        ``spare`` bytes are needed beside the matrices while they are factored, and not later; ``beside`` are operations
        that the seconds count elsewhere: of solves in a sweep, of tiles on the diagonal that are computed whole.
        """
        rows, rates = self.rows, self.rates
        block = block or rows.n_rows
        products = 4.0 * rows.n_rows * self.samples * rows.product_cost()
        peak, working = self._bytes(matrices, spare, block)
        sweep = max(1.2 * products / rates.single, 2.0 * self.held / rates.bandwidth)
        forming = self.entries / rates.formed + rows.forming_chunks(self.storage, working) * rates.chunk
        seconds = work / (rates.double if double else rates.single) + extra + forming
        if self.storage == "half":
            sweep *= 2.0
            seconds += forming  # the final residual
        elif self.storage == "host":
            sweep += rows.kept_bytes() / rates.transfer
        elif self.storage == "form":
            parts = 1 if block * self.row_bytes <= working // 2 else -(-4 * block * self.row_bytes // working)
            sweep += forming * (1.2 if parts == 1 else 2.2)
            seconds += forming * max(0.0, (parts - 1) / 2)
        elif self.storage == "products":
            sweep += 4.0 * forming * self.samples
            seconds += forming * 2.0 * block
        seconds += sweep * sweeps
        return Plan(
            projector, self.storage, why, rows.n_rows, rows.n_columns, self.samples, peak, work + products / 2 + beside,
            self.limit, working, seconds,
        )  # fmt: skip

    def _bytes(self, matrices: int, spare: int, block: int) -> tuple[int, int]:
        """Return the peak, and the working bytes that lead to it: what the limit leaves, as far as that is of use.

        Three phases follow each other: rows are formed; matrices are summed, then factored; vectors are projected.
        """
        rows, storage = self.rows, self.storage
        lasting = self.held + matrices + (block * self.row_bytes if storage == "host" else 0)
        most = lasting + max(self.vectors, spare)
        least = rows.least_working_bytes(storage, self.samples)
        room = self.limit - most
        if room < least:
            return most + least, least
        working = room if storage == "form" else min(room, rows.working_bytes)
        gram, products = rows.passing_bytes(storage, working, block, self.samples)
        forming = self.held + rows.forming_bytes(storage, working)
        return max(forming, lasting + spare, lasting + gram, lasting + self.vectors + products), working
