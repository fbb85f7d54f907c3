"""One fit from top to bottom: open the data, plan, try, build, draw, measure.

The functions take and return values. What a fit builds on the training data is :class:`Prepared`; what it measures is
:class:`Measured <nullbayes.posteriors.measured.Measured>`, which the posterior reports.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ConvergenceWarning, SettingsError
from nullbayes.posteriors.arguments import Base, Noise, draw_seed, memory_limit_bytes
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.posteriors.measured import Measured, measure, merged, timed
from nullbayes.posteriors.parallel import divided, own_data, project_some
from nullbayes.posteriors.plan import (
    FitPlan,
    FitRequest,
    Prepared,
    RowSource,
    Shared,
    make_plan,
    within_memory,
)
from nullbayes.posteriors.preview import warn_of_small_limit
from nullbayes.posteriors.progress import Meter, Progress
from nullbayes.posteriors.promise import SAMPLES, Promise, answers, inspected, least_precision, split
from nullbayes.posteriors.sigma import with_estimate
from nullbayes.projectors import Outcome, Projection, Projector, choose


@dataclass(frozen=True)
class Samples:
    """The directions (S, P) of all samples, what was measured on them, and whether the user stopped the last ones."""

    directions: Tensor
    measured: Measured
    interrupted: bool = False


def fit(
    ask: Callable[[], FitRequest],
    device: torch.device,
    base: Base | None,
    generator: torch.Generator | None,
    checkpoint: str | os.PathLike[str] | None,
    *,
    show: bool,
    trial: bool,
) -> tuple[Prepared, Samples]:
    """Fit a posterior: open the data and ask for a fit to their rows, plan it, and draw samples.

    ``base`` and ``generator`` give the noise, and ``checkpoint`` is the file from which a killed fit continues. A
    ``trial`` measures which prior precision keeps the promise.
    """
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress(show=show))
        meter = Meter(device, bar.phase)
        with meter.phase("data"):
            request = ask()
        store = None if checkpoint is None else stack.enter_context(Checkpoint(checkpoint, request.group))
        noise, plan = begin(request, base, None if generator is None else draw_seed(generator), store)
        promise = None
        if trial:
            with meter.phase("trial"):
                promise = run_trial(request, noise)

        def work(plan: FitPlan) -> tuple[Prepared, Samples]:
            if store is not None:
                store.follow(plan)
            prepared = build(request, plan, meter)
            return prepared, draw(prepared, noise, request.n_samples, bar, meter, promise=promise, store=store)

        return within_memory(request, plan, work)


def own_source(source: RowSource, shared: Shared, checkpoint: object = None) -> RowSource:
    """Return the same with the network of all parameters, or of those of this process if parameters are shared."""
    network = source.network.whole
    if shared.what == "parameters" and shared.group.size > 1:
        network = divided(network, shared.group, checkpoint)
    return replace(source, network=network)


def make_request(
    source: RowSource,
    data: Any,
    shared: Shared,
    n_samples: int,
    projector: str | Projector,
    tolerance: float,
    memory_limit: int | str | None,
    *,
    tuned: bool = False,
) -> FitRequest:
    """Open the training data of a fit, or this process's part of them, and ask for samples.

    The noise of a regression is estimated where it was not given, without a warning if it is ``tuned`` afterwards.
    """
    own = data if shared.group.size == 1 else own_data(source, data, shared)
    rows = source.rows(own)
    if rows.likelihood.name == "regression":
        rows = with_estimate(source, rows, tuned=tuned)
    samples = shared.group if shared.what == "samples" else None
    return FitRequest(rows, n_samples, projector, tolerance, memory_limit, samples)


def begin(request: FitRequest, base: Base | None, seed: int | None, store: Checkpoint | None) -> tuple[Noise, FitPlan]:
    """Return the noise and the plan of a fit: those of its checkpoint, if there is one, or new ones."""
    stored = None if store is None else store.stored(request, seed)
    if stored is None:
        noise, memory = Noise(base, request.group.first(lambda: draw_seed(None) if seed is None else seed)), None
    else:
        noise, memory = Noise(base, stored[0]), stored[1]
    if store is None or memory is None:
        plan = make_plan(request)
    else:
        try:
            plan = make_plan(request, memory.limit, memory.host, memory.halvings)
        except SettingsError:
            store.refuse("its memory is too small for it")
    if request.memory_limit is not None and plan.choice is not None and request.group.size == 1:
        rows, n_samples, rtol = request.rows, request.n_samples, request.tolerance
        again = partial(choose, rows, n_samples=n_samples, rtol=rtol, host_limit=plan.host)
        warn_of_small_limit(plan.choice, again, memory_limit_bytes(None, rows.device))
    if store is not None:
        drawn = None if base is None else noise.draw(request.rows.network, 0, request.n_samples)
        store.begin(request, plan, noise.seed, drawn)
    return noise, plan


def run_trial(request: FitRequest, noise: Noise) -> Promise:
    """Fit a small posterior to some of the training data, and measure which precision others, kept apart, require.

    The noise is that of the fit's own samples.
    """
    rows, folds = request.rows, split(request.rows, noise.seed)
    looks = ((rows.examples.chosen(apart), _trial_directions(request, inside, noise)) for inside, apart in folds)
    seen = answers(rows, looks)
    needed, by = least_precision(seen)
    return Promise(sum(len(apart) for _, apart in folds), len(folds[0][0]), needed, 0.0, by, seen.std)


def _trial_directions(request: FitRequest, inside: Sequence[int], noise: Noise) -> Tensor:  # (S, P)
    """Return noise, projected on the null space of the rows of some examples."""
    rows, n_samples = request.rows, SAMPLES if noise.base is None else request.n_samples
    if not inside:
        return noise.draw(rows.network, 0, n_samples)[:n_samples].to(rows.device, rows.dtype)
    asked, plan = _trial_plan(replace(request, rows=rows.on(rows.examples.chosen(inside))), n_samples)
    drawn = noise.draw(rows.network, 0, asked.n_samples)[: asked.n_samples]

    def work(plan: FitPlan) -> Tensor:
        state = plan.projector.prepare(asked.rows.within(plan.working_bytes).stored(plan.storage))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a residual only adds to the variance
            projection = plan.projector.apply(state, drawn)
        if projection.info.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        return projection.directions

    return within_memory(asked, plan, work)


def _trial_plan(request: FitRequest, n_samples: int) -> tuple[FitRequest, FitPlan]:
    """Plan for so many samples, or for those of the fit if memory is too small, or with the fit's own projector."""
    for asked in (replace(request, n_samples=n_samples, projector="auto"), replace(request, projector="auto")):
        with contextlib.suppress(SettingsError):
            return asked, make_plan(asked)
    return request, make_plan(request)


def build(request: FitRequest, plan: FitPlan, meter: Meter) -> Prepared:
    """Build rows and projector by a plan."""
    jacobian = request.rows.within(plan.working_bytes)
    with meter.phase("rows"):
        rows = jacobian.stored(plan.storage)
    with meter.phase("factors"):
        state = plan.projector.prepare(rows)
    return Prepared(request, plan, jacobian, rows, state)


def project(prepared: Prepared, noise: Tensor, bar: Progress, store: Checkpoint | None) -> Projection:  # (S, P)
    """Project noise; where processes share the samples, each projects some of them, and all get all."""
    projector, group = prepared.plan.projector, prepared.request.samples
    if group is not None:
        return project_some(group, prepared, noise, bar, store)
    return projector.apply(prepared.state, noise, callback=bar.sweeps(projector.rtol), store=store)


def draw(
    prepared: Prepared,
    noise: Noise,
    n_samples: int,
    bar: Progress,
    meter: Meter,
    *,
    before: Samples | None = None,
    promise: Promise | None = None,
    store: Checkpoint | None = None,
    note: str = "",
) -> Samples:
    """Draw samples and measure them, together with those ``before`` them."""
    start = 0 if before is None else len(before.directions)
    drawn = noise.draw(prepared.jacobian.network, start, n_samples)
    with meter.phase("projection"):
        projection = project(prepared, drawn, bar, store)
    directions = projection.directions[:n_samples]
    estimates = projection.info.traces[slice(0, n_samples) if noise.base is None else slice(n_samples, None)]
    with meter.phase("measure"):
        measured = measure(prepared, noise, directions, projection.info, estimates)
        measured = replace(measured, promise=promise, notes=(*measured.notes, note) if note else measured.notes)
        if before is not None:
            measured = merged(before.measured, measured)
            directions = torch.cat([before.directions, directions])
        if measured.promise is not None:
            closed = measured.precision("optimal", prepared.jacobian.network.whole.theta)
            kept = inspected(measured.promise, prepared.jacobian, directions, closed, noise.seed)
            measured = replace(measured, promise=kept)
    measured = timed(measured, *meter.slowest(prepared.request.group))
    measured = prepared.jacobian.network.group.first(lambda: measured)  # where processes predict together
    return Samples(directions, measured, projection.info.outcome is Outcome.INTERRUPTED)
