"""What a fit would do, before anything is spent."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from torch import nn

from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.batches import BatchFn, is_array
from nullbayes.jacobian.data import Expected, read_beginning
from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.loss_projected import LossProjectedPosterior
from nullbayes.posteriors.projected import ProjectedPosterior
from nullbayes.posteriors.promise import SAMPLES, split
from nullbayes.posteriors.resources import host_memory_bytes, memory_limit_bytes
from nullbayes.projectors import Plan, choose

_BESIDE = 0.5  # seconds that a fit takes however small it is: checks, and the search for a precision


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
) -> Plan:
    """Return the projector that a fit would take, why, and an estimate of its memory and work.

    Parameters
    ----------
    model, loader, n_samples, memory_limit, likelihood, parameters, batch_fn, output_fn, tolerance
        As for the posteriors and their ``fit``.
    loss : bool
        Plan for the loss-projected posterior.

    Notes
    -----
    At most four batches are read where the loader says how long it is. The number of examples is that of the dataset of
    a DataLoader, or the sum over a list of batches; of any other loader it is the number of batches times the size of
    the first ones, and ``print(plan)`` says so. A loader without a length is read to its end.

    The time is an estimate for ``prior_precision="auto"`` with the default projector. It knows the kind of device and
    whether torch has one thread or several, not how fast this machine is. On one thread of the CPU for which its rates
    were measured, seven fits of 0.3 to 75 s took 0.6 to 3 times what was planned, the longer ones beside other work; on
    other machines it may be further off. It does not count how long the loader takes to read the data.

    The plan is the one that ``fit`` makes with the same memory limit. The data that were not read can change it only
    where some positions do not count (``ignore_index``) and none of those is in the first batches. Checks of all the
    data (NaN, labels, whether they are the same when read again) are left to ``fit``.
    """
    if is_array(n_samples):
        msg = "Inputs and targets are passed as one pair here: nb.plan(model, (x, y))."
        raise DataError(msg)
    kind, posterior = (LossJacobian, LossProjectedPosterior) if loss else (OutputJacobian, ProjectedPosterior)
    tolerance = posterior._tolerance if tolerance is None else tolerance
    network = Network(model, parameters, output_fn)
    beginning = read_beginning(loader, batch_fn, network.device, network.dtype)
    first = kind(network, beginning.examples, likelihood)
    rows = first.on(Expected(beginning.examples, beginning.n_examples))
    limit = memory_limit_bytes(memory_limit, rows.device)
    host = host_memory_bytes(rows.device)

    def chosen(rows: JacobianRows, n: int) -> Plan:
        return choose(rows, n_samples=n, memory_limit=limit, rtol=tolerance, host_limit=host)

    found = chosen(rows, n_samples)
    seconds = found.seconds + _BESIDE
    for inside, _ in split(rows, 0):
        if inside:
            with contextlib.suppress(SettingsError):  # a trial that does not fit has a smaller plan of its own
                seconds += chosen(first.on(Expected(beginning.examples, len(inside))), SAMPLES).seconds
    note = f"planned for about {beginning.n_examples:,} examples, by the length of the loader"
    return replace(found, seconds=seconds, note=note if beginning.estimated else "")
