"""``nb.plan``: what a fit would do, before it is done; and a warning where a small memory limit makes it slow."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from nullbayes.distributed import Group
from nullbayes.errors import DataError, SettingsError, warn
from nullbayes.jacobian.batches import BatchFn, is_array
from nullbayes.jacobian.beginning import Expected, read_beginning
from nullbayes.jacobian.division import expected
from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.arguments import host_memory_bytes, memory_limit_bytes
from nullbayes.posteriors.plan import LOSS_TOLERANCE, TOLERANCE
from nullbayes.posteriors.promise import SAMPLES, split
from nullbayes.projectors import Plan, choose

_BESIDE = 0.5  # seconds that a fit takes however small it is: checks, and the search for a precision
_LONG = 60.0  # seconds of a plan from which on others are looked for
_SOONER = 5.0  # times: plans are rough


def plan(
    model: nn.Module,
    loader: Any,
    n_samples: int = 30,
    memory_limit: int | str | None = None,
    *,
    likelihood: str | Likelihood | LossFn = "classification",
    loss: bool = False,
    parameters: Selection = None,
    batch_fn: BatchFn | None = None,
    output_fn: OutputFn | None = None,
    tolerance: float | None = None,
    processes: int = 1,
    parallel: str = "data",
) -> Plan:
    """Return the projector that a fit would use, the reason, and an estimate of its memory and time.

    Parameters
    ----------
    model, loader, n_samples, memory_limit, likelihood, parameters, batch_fn, output_fn, tolerance
        As for the posteriors and their ``fit``.
    loss : bool
        Plan for the loss-projected posterior.
    processes : int
        The number of processes of a fit by ``torchrun``: the plan says what each of them holds.
    parallel : "data" or "parameters"
        What these processes share. With "samples" each does what a process by itself does.

    Returns
    -------
    Plan
        What ``fit`` does with the same memory limit; it prints.

    Notes
    -----
    At most four batches are read if the loader has a length, and all of them otherwise. The number of examples is that
    of the dataset of a DataLoader, or the sum over a list of batches; for other loaders it is estimated from the first
    batches, and ``print(plan)`` says so. Data that were not read can change the plan only if some of their positions
    do not count (``ignore_index``) and the first batches have none such. ``fit`` checks all of the data.

    The time is that of ``prior_precision="auto"``, without the time that the loader takes. On a CPU, a product of
    matrices is timed once per process, which tells how fast the machine is; the choice of the projector does not depend
    on that. How many sweeps a fit needs depends on what the network has learned, which a plan cannot see: fits of image
    networks took 0.6 to 3 times as long as planned. A fit that takes more than a minute because ``memory_limit`` is
    small causes a warning, with a limit that makes it sooner; ``fit`` gives it, too.

    Examples
    --------
    >>> import torch, nullbayes as nb
    >>> found = nb.plan(torch.nn.Linear(20, 10), (torch.randn(300, 20), torch.arange(300) % 10))
    >>> found.n_rows, found.n_parameters, type(found.projector).__name__, found.storage
    (3000, 210, 'ExactPrimal', 'device')
    """
    if is_array(n_samples):
        msg = "Inputs and targets are passed as one pair here: nb.plan(model, (x, y))."
        raise DataError(msg)
    if processes < 1:
        msg = f"processes must be at least 1, not {processes}."
        raise SettingsError(msg)
    if parallel not in ("data", "parameters"):
        msg = f'parallel must be "data" or "parameters" here, not {parallel!r}; with "samples" leave processes out.'
        raise SettingsError(msg)
    kind, default = (LossJacobian, LOSS_TOLERANCE) if loss else (OutputJacobian, TOLERANCE)
    network = Network(model, parameters, output_fn)
    if parallel == "parameters" and processes > 1:
        network, processes = network.part(expected(network.sizes, processes)), 1
    beginning = read_beginning(loader, batch_fn, network.device, network.dtype)
    first = kind(network, beginning.examples, likelihood)
    group = Group(size=processes)
    rows = first.on(Expected(beginning.examples, beginning.n_examples, group))
    limit, host = memory_limit_bytes(memory_limit, rows.device), host_memory_bytes(rows.device)
    rtol = default if tolerance is None else tolerance
    chosen = functools.partial(choose, memory_limit=limit, rtol=rtol, host_limit=host)
    found = chosen(rows, n_samples=n_samples)
    if memory_limit is not None:
        again = functools.partial(choose, rows, n_samples=n_samples, rtol=rtol, host_limit=host)
        warn_of_small_limit(found, again, memory_limit_bytes(None, rows.device))
    seconds = found.seconds + _BESIDE
    for inside, _ in split(rows, 0):
        if inside:
            trial = Expected(beginning.examples, len(inside), group)
            with contextlib.suppress(SettingsError):  # a trial that does not fit has a smaller plan of its own
                seconds += chosen(first.on(trial), n_samples=SAMPLES).seconds
    note = f"planned for about {beginning.n_examples:,} examples, by the length of the loader"
    found = dataclasses.replace(found, seconds=seconds, note=note if beginning.estimated else "")
    return found.for_this_machine(rows.device)


def warn_of_small_limit(plan: Plan, again: Callable[..., Plan], free: int) -> None:
    """Warn of a plan that takes long where twice its memory, or four times as much, and so on, makes it far sooner.

    ``again(memory_limit=...)`` plans for another limit, of at most the bytes that are ``free``.
    """
    if plan.seconds < _LONG:
        return
    limit = 2 * plan.memory_limit
    while limit <= free:
        other = again(memory_limit=limit)
        if other.seconds * _SOONER <= plan.seconds:
            break
        limit *= 2
    else:
        return
    message = (
        f"The memory limit of {plan.memory_limit / 2**20:.1f} MiB makes this fit slow: about {_time(plan.seconds)}, "
        f"where it would take about {_time(other.seconds)} with memory_limit="
        f'"{math.ceil(limit / 2**20)}MB", which is free. Take that, or fewer samples.'
    )
    warn(message)


def _time(seconds: float) -> str:
    return f"{max(1.0, seconds):.0f} s" if seconds < 90.0 else f"{seconds / 60.0:.0f} min"
