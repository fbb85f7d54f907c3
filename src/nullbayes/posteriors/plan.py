"""Planning: what was requested of a fit, how it will be done within memory, and how with less memory.

A fit makes a :class:`FitPlan` from a :class:`FitRequest`. Whenever memory runs out, :func:`shrink` makes a smaller one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nullbayes.distributed import Group, resolve
from nullbayes.errors import DistributedError, SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Likelihood
from nullbayes.limits import OutOfMemory, Storage
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors.arguments import host_memory_bytes, memory_limit_bytes
from nullbayes.projectors import Plan, Projector, choose, least_bytes

T = TypeVar("T")
TOLERANCE, LOSS_TOLERANCE = 1e-2, 2e-2  # of a fit that is not given another, for rows of outputs and of losses


@dataclass(frozen=True)
class Shared:
    """What the processes of a fit share: the training data, the samples, the parameters, or nothing."""

    what: str | None
    group: Group


@contextlib.contextmanager
def sharing(parallel: str | None) -> Iterator[Shared]:
    """Join the processes of a call with ``parallel=...``: all of them fail if one does, and the first speaks."""
    group = resolve(parallel)
    with group.one_voice():
        yield Shared(parallel, group)


@dataclass(frozen=True)
class RowSource:
    """What the rows of training data are made with: a class of rows, a network, and what its outputs mean."""

    kind: Callable[..., JacobianRows]
    network: Network
    likelihood: Likelihood
    batch_fn: BatchFn | None
    options: Mapping[str, Any]

    def rows(self, data: Any) -> JacobianRows:
        """Open training data."""
        return self.kind(self.network, data, self.likelihood, batch_fn=self.batch_fn, **self.options)


@dataclass(frozen=True)
class FitRequest:
    """What the user asked for, and the rows of the training data.

    ``samples`` are the processes that share the samples among them; None for a fit that projects all samples together.
    """

    rows: JacobianRows
    n_samples: int
    projector: str | Projector
    tolerance: float
    memory_limit: int | str | None
    samples: Group | None = None

    @property
    def group(self) -> Group:
        """The processes of the fit, whatever they share."""
        if self.samples is not None:
            return self.samples
        network, examples = self.rows.network, self.rows.examples
        return examples.group if network.division is None else network.group


@dataclass(frozen=True)
class FitPlan:
    """How a fit is done.

    Attributes
    ----------
    projector, storage, working_bytes
        As in a :class:`Plan <nullbayes.projectors.Plan>`.
    limit, host : int
        The free bytes of the device and of the host from which the first plan was made.
    choice : Plan or None
        The choice of the projector; None where the user gave one.
    halvings : int
        How often the plan was made smaller.
    notes : tuple of str
        What the user should read about that.
    """

    projector: Projector
    storage: Storage
    working_bytes: int
    limit: int
    host: int
    choice: Plan | None = None
    halvings: int = 0
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why this projector is used."""
        return "as asked for" if self.choice is None else self.choice.reason

    @property
    def key(self) -> tuple[str, str, int]:
        """All that the numbers of the result depend on, to the last bit."""
        return described(self.projector), self.storage, self.working_bytes


@dataclass(frozen=True)
class Prepared:
    """What a fit has built on the training data, and needs again to draw more samples.

    ``jacobian`` are the rows as they can be formed, ``rows`` the same as they are held, and ``state`` is what the
    projector has prepared.
    """

    request: FitRequest
    plan: FitPlan
    jacobian: JacobianRows
    rows: Rows
    state: Any


def described(projector: str | Projector) -> str:
    """Return the name and the settings of a projector, the same in every process."""
    if isinstance(projector, str) or dataclasses.is_dataclass(projector):
        return str(projector)
    settings = ", ".join(f"{name}={value}" for name, value in sorted(vars(projector).items()))
    return f"{type(projector).__name__}({settings})"


def make_plan(request: FitRequest, limit: int | None = None, host: int | None = None, halvings: int = 0) -> FitPlan:
    """Plan a fit for the memory that is free now, or for other limits, and make the plan smaller so many times."""
    rows, projector = request.rows, request.projector
    if not isinstance(projector, Projector) and projector != "auto":
        msg = f'projector must be "auto" or a projector such as nb.projectors.Krylov(), not {projector!r}.'
        raise SettingsError(msg)
    limit = available_bytes(request.memory_limit, rows.device, request.group) if limit is None else limit
    host = (
        min(request.group.gather(host_memory_bytes(rows.device) // request.group.neighbours)) if host is None else host
    )
    if isinstance(projector, Projector):
        storage: Storage = "device" if rows.costs().held_bytes <= limit // 2 else "recompute"
        plan = FitPlan(projector, storage, min(rows.working_bytes, limit // 8), limit, host)
    else:
        n, rtol = request.n_samples, request.tolerance
        choice = choose(rows, n_samples=n, memory_limit=limit, rtol=rtol, host_limit=host)
        plan = FitPlan(choice.projector, choice.storage, choice.working_bytes, limit, host, choice)
    for _ in range(halvings):
        plan = shrink(request, plan)
    if len(set(request.group.gather(plan.key))) > 1:
        msg = "The processes come to different plans: they need the same kind of device and number of threads."
        raise DistributedError(msg)
    return plan


def available_bytes(limit: int | str | None, device: torch.device, group: Group) -> int:
    """Return the memory limit of each of some processes: a share of what is free where they run on one machine."""
    mine = memory_limit_bytes(limit, device)
    return min(group.gather(mine // group.neighbours if limit is None and device.type == "cpu" else mine))


def shrink(request: FitRequest, plan: FitPlan, cause: BaseException | None = None) -> FitPlan:
    """Return a plan with about half the memory, or raise an error that says what to change where there is none."""
    smaller = _smaller_blocks(request, plan) if plan.choice is None else _smaller_choice(request, plan, plan.choice)
    if isinstance(smaller, str):
        raise SettingsError(smaller) from cause
    return smaller


def _smaller_choice(request: FitRequest, plan: FitPlan, choice: Plan) -> FitPlan | str:
    """Choose again for half the memory; return a refusal where nothing needs less."""
    rows, n, rtol, host = request.rows, request.n_samples, request.tolerance, plan.host >> (plan.halvings + 1)
    least, peak = least_bytes(rows, n_samples=n, rtol=rtol, host_limit=host), max(1, choice.peak_bytes)
    if peak <= least:
        return (
            "Memory ran out although no plan takes less: the least memory_limit that would do is "
            f"{math.ceil(least / 2**20)} MiB, beside the model and the data. Free as much, or take fewer samples, or "
            "use projector=nb.projectors.Lanczos(rank=...)."
        )
    new = choose(rows, n_samples=n, memory_limit=max(least, peak // 2), rtol=rtol, host_limit=host)
    note = f"memory ran out where {_mib(peak)} were planned; planned again with {_mib(new.peak_bytes)}"
    return dataclasses.replace(
        plan,
        projector=new.projector,
        storage=new.storage,
        working_bytes=new.working_bytes,
        choice=new,
        halvings=plan.halvings + 1,
        notes=(*plan.notes, note),
    )


def _smaller_blocks(request: FitRequest, plan: FitPlan) -> FitPlan | str:
    """Halve the blocks of the user's projector, then hold less; return a refusal where neither is possible."""
    rows, before = request.rows, plan.working_bytes
    halved = plan.projector.smaller(rows)
    projector = halved or plan.projector
    # blocks of half the size may be enough the first time; afterwards the rows are no longer held either
    storage: Storage = plan.storage if halved is not None and plan.halvings == 0 else "recompute"
    least, useful = rows.costs(storage).least_working_bytes(request.n_samples), 4 * rows.costs().held_bytes
    working = min(before, max(least, min(before // 2, useful)))
    if (projector, storage, working) == (plan.projector, plan.storage, before):
        return (
            f"Memory ran out with {projector}, rows: {storage}, {working} bytes at a time, the least that it can do "
            f'with: {projector.memory_advice}, or use projector="auto", which plans for the memory that there is.'
        )
    where, size = "formed again in every sweep" if storage == "recompute" else "held", projector.block_size(rows)
    blocks = "" if size is None else f"blocks of {size:,} rows, "
    note = f"memory ran out; went on with {blocks}rows {where}, {_mib(working)} at a time"
    return dataclasses.replace(
        plan,
        projector=projector,
        storage=storage,
        working_bytes=working,
        halvings=plan.halvings + 1,
        notes=(*plan.notes, note),
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def within_memory(request: FitRequest, plan: FitPlan, work: Callable[[FitPlan], T]) -> T:
    """Work by a plan; whenever memory runs out, in any process, start again by a smaller one."""
    while True:
        done = request.group.attempt(functools.partial(work, plan))
        if not isinstance(done, OutOfMemory):
            return done
        plan = shrink(request, plan, done.error)
