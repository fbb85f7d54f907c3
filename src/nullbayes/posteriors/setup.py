"""How a fit goes about its rows, and how it goes on with less when memory runs out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from nullbayes.errors import SettingsError
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.memory import give_back, is_out_of_memory
from nullbayes.posteriors.resources import host_memory_bytes, memory_limit_bytes
from nullbayes.projectors import Projector, choose, least_bytes
from nullbayes.types import Storage


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    rows: JacobianRows
    n_samples: int
    projector: str | Projector
    tolerance: float
    memory_limit: int | str | None


@dataclass(frozen=True)
class Setup:
    """What will be done.

    Attributes
    ----------
    projector, reason, storage, working_bytes
        As in a :class:`Plan <nullbayes.projectors.Plan>`.
    limit, host : int
        The bytes of the device and of the host that there were at first.
    peak : int or None
        What it takes by a plan.
    notes : tuple of str
        How it became smaller than at first, one for each time.
    at_once : int
        Samples that are drawn at a time, where that is what becomes smaller first; else 0.
    """

    projector: Projector
    reason: str
    storage: Storage
    working_bytes: int
    limit: int
    host: int
    peak: int | None
    notes: tuple[str, ...] = ()
    at_once: int = 0

    def __str__(self) -> str:
        """Say all that the result depends on, to the last bit."""
        return f"{self.projector}, rows: {self.storage}, {self.working_bytes} bytes at a time"


def set_up(asked: Asked, limit: int | None = None, host: int | None = None, halvings: int = 0) -> Setup:
    """Make a plan where "auto" asks for one, within the memory that there is now unless told otherwise."""
    rows, projector = asked.rows, asked.projector
    if not isinstance(projector, Projector) and projector != "auto":
        msg = f'projector must be "auto" or a projector such as nb.projectors.Krylov(), not {projector!r}.'
        raise SettingsError(msg)
    limit = memory_limit_bytes(asked.memory_limit, rows.device) if limit is None else limit
    host = host_memory_bytes(rows.device) if host is None else host
    if isinstance(projector, Projector):
        storage: Storage = "device" if rows.costs().held_bytes <= limit // 2 else "recompute"
        setup = Setup(projector, "as asked for", storage, min(rows.working_bytes, limit // 8), limit, host, None)
    else:
        plan = choose(rows, n_samples=asked.n_samples, memory_limit=limit, rtol=asked.tolerance, host_limit=host)
        setup = Setup(
            plan.projector, plan.reason, plan.storage, plan.working_bytes, limit, host, max(1, plan.peak_bytes)
        )
    for _ in range(halvings):
        setup = smaller(asked, setup)
    return setup


def smaller(asked: Asked, setup: Setup) -> Setup:
    """Return the same with about half the memory, or say what to change where there is no such thing."""
    if setup.at_once > 1:
        return dataclasses.replace(setup, at_once=(setup.at_once + 1) // 2)
    return _smaller_blocks(asked, setup) if setup.peak is None else _smaller_plan(asked, setup, setup.peak)


def within_memory(asked: Asked, setup: Setup, work: Callable[[Setup], None], forget: Callable[[], object]) -> None:
    """Work, and whenever memory runs out forget what was built and work again with half of it."""
    while True:
        try:
            return work(setup)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # whose frames hold what is to be freed
            failure.__context__ = None
        forget()
        give_back()
        try:
            setup = smaller(asked, setup)
        except SettingsError as error:
            raise error from failure


def _smaller_plan(asked: Asked, setup: Setup, peak: int) -> Setup:
    rows, n, rtol, host = asked.rows, asked.n_samples, asked.tolerance, setup.host >> (len(setup.notes) + 1)
    least = least_bytes(rows, n_samples=n, rtol=rtol, host_limit=host)
    if peak <= least:
        msg = (
            "Memory ran out although no plan takes less: the least memory_limit that would do is "
            f"{math.ceil(least / 2**20)} MiB, beside the model and the data. Free as much, or take fewer samples, or "
            "use projector=nb.projectors.Lanczos(rank=...)."
        )
        raise SettingsError(msg)
    plan = choose(rows, n_samples=n, memory_limit=max(least, peak // 2), rtol=rtol, host_limit=host)
    note = f"memory ran out where {_mib(peak)} were planned; planned again with {_mib(plan.peak_bytes)}"
    return dataclasses.replace(
        setup, projector=plan.projector, reason=plan.reason, storage=plan.storage, working_bytes=plan.working_bytes,
        peak=plan.peak_bytes, notes=(*setup.notes, note),
    )  # fmt: skip


def _smaller_blocks(asked: Asked, setup: Setup) -> Setup:
    rows, before = asked.rows, setup.working_bytes
    halved = setup.projector.smaller(rows)
    projector = halved or setup.projector
    # blocks of half the size may be enough; if they are not, nothing else is held either
    storage: Storage = setup.storage if halved is not None and not setup.notes else "recompute"
    least, useful = rows.costs(storage).least_working_bytes(asked.n_samples), 4 * rows.costs().held_bytes
    working = min(before, max(least, min(before // 2, useful)))
    if (projector, storage, working) == (setup.projector, setup.storage, before):
        msg = (
            f"Memory ran out with {setup}, the least that it can do with: {projector.memory_advice}, or use "
            'projector="auto", which plans for the memory that there is.'
        )
        raise SettingsError(msg)
    where = "formed again in every sweep" if storage == "recompute" else "held"
    size = projector.block_size(rows)
    blocks = "" if size is None else f"blocks of {size:,} rows, "
    note = f"memory ran out; went on with {blocks}rows {where}, {_mib(working)} at a time"
    return dataclasses.replace(
        setup, projector=projector, storage=storage, working_bytes=working, notes=(*setup.notes, note)
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
