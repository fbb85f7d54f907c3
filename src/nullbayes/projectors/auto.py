"""The choice of a projector by rows, parameters, samples and memory, with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from nullbayes.errors import SettingsError
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.alternating import Alternating, balanced_block_rows
from nullbayes.projectors.base import Projector
from nullbayes.projectors.dual import ExactDual
from nullbayes.projectors.krylov import Krylov
from nullbayes.projectors.primal import ExactPrimal

_DIRECT_ROWS = 3_000  # up to here the eigenvectors of a float64 Gram matrix take seconds on two cores
_DIRECT_COLUMNS = 2_500  # eigenvectors of A⊤A cost about nine times the cube


@dataclass(frozen=True)
class Plan:
    """What a fit would do, and why.

    Attributes
    ----------
    projector : Projector
        The method, with its settings.
    keep : bool
        Whether all rows are held in memory; if not, each sweep forms them again, block by block.
    reason : str
        One sentence.
    n_rows, n_parameters, n_samples : int
        The problem.
    peak_bytes : int
        Estimated need beside the model and the data.
    operations : float
        Estimated floating-point operations to prepare, and for one sweep.
    memory_limit : int
        What it was planned for.
    """

    projector: Projector
    keep: bool
    reason: str
    n_rows: int
    n_parameters: int
    n_samples: int
    peak_bytes: int
    operations: float
    memory_limit: int

    def __str__(self) -> str:
        """Describe the plan in a few lines."""
        rows = "held in memory" if self.keep else "formed again, block by block, in every sweep"
        return (
            f"{self.n_rows:,} rows over {self.n_parameters:,} parameters, {self.n_samples} samples\n"
            f"  projector  {self.projector}\n  because    {self.reason}\n  rows       {rows}\n"
            f"  memory     {self.peak_bytes / 2**30:.2f} GiB of {self.memory_limit / 2**30:.2f}\n"
            f"  work       {self.operations:.2g} operations to prepare and sweep once"
        )


def choose(rows: Rows, *, n_samples: int, memory_limit: int, rtol: float = 1e-2) -> Plan:
    """Pick the projector that reaches the tolerance soonest within the memory limit, by a simple count of the work."""
    r, p, s = rows.n_rows, rows.n_columns, n_samples
    item = rows.dtype.itemsize
    vectors = 6 * s * p * item  # noise, directions and what an iteration carries
    kept = rows.kept_bytes()
    room = memory_limit - vectors
    if room <= 0:
        msg = (
            f"{s} samples of {p:,} parameters alone need {vectors / 2**30:.2f} GiB, over the memory limit of "
            f"{memory_limit / 2**30:.2f} GiB: take fewer samples or raise memory_limit."
        )
        raise SettingsError(msg)

    def plan(projector: Projector, why: str, extra: int, work: float) -> Plan:
        keep = kept + extra <= room
        needed = vectors + extra + (kept if keep else 0)
        return Plan(projector, keep, why, r, p, s, needed, work + 4.0 * r * s * rows.product_cost(), memory_limit)

    if r <= min(p - 1, _DIRECT_ROWS) and 32 * r * r <= room:
        why = (
            f"{r:,} rows are few: the eigenvectors of their Gram matrix are removed, leading ones first, "
            "until the tolerance is met"
        )
        return plan(ExactDual(truncate=True, rtol=rtol), why, 32 * r * r, r * r * rows.gram_cost() / 2 + 9.0 * r**3)
    if p <= min(r, _DIRECT_COLUMNS) and 32 * p * p <= room:
        why = (
            f"only {p:,} parameters and {r:,} rows: there may be no exact kernel, "
            "so the eigenvectors of A⊤A are removed, leading ones first, until the tolerance is met"
        )
        return plan(ExactPrimal(truncate=True, rtol=rtol), why, 32 * p * p, 2.0 * r * p * p + 9.0 * p**3)
    block = balanced_block_rows(rows, s)
    while block > rows.granule and _sweep_bytes(rows, block) + (kept if kept <= 0.7 * room else 0) > room:
        block = max(rows.granule, block // 2)
    extra = _sweep_bytes(rows, block)
    if extra > room:
        msg = (
            f"One block of {block} rows needs {extra / 2**30:.2f} GiB beside the samples, over the memory limit of "
            f"{memory_limit / 2**30:.2f} GiB: raise memory_limit, or use projector=nb.projectors.Lanczos(rank=...)."
        )
        raise SettingsError(msg)
    why = (
        f"{r:,} rows and {p:,} parameters are too many for the direct methods: conjugate gradients over blocks of "
        f"{block:,} rows"
    )
    work = r * block * rows.gram_cost() / 2 + r * block**2 / 3
    return plan(Krylov(Alternating(block_rows=block), rtol=rtol), why, extra, work)


def _sweep_bytes(rows: Rows, block: int) -> int:
    """Return the bytes of all block factors, two more matrices while factoring, and entries of a block in passing."""
    factors = (rows.n_rows * block + 2 * block * block) * 8
    return factors + (0 if rows.kept_bytes() == 0 else block * rows.n_columns * rows.dtype.itemsize // 4)
