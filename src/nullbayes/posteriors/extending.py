"""More samples of a posterior that has some, and what that needs of the training data, built again.

``extend`` and ``prepare`` are methods of the projected posteriors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.limits import OutOfMemory
from nullbayes.posteriors import fitting
from nullbayes.posteriors.arguments import Noise, whole
from nullbayes.posteriors.measured import Measured
from nullbayes.posteriors.plan import FitPlan, FitRequest, make_plan, sharing, shrink, within_memory
from nullbayes.posteriors.progress import Meter, Progress
from nullbayes.projectors import Projector

P = TypeVar("P")


def extend(self: P, n_samples: int, *, progress: bool = True) -> P:
    """Draw more samples and keep the earlier ones: ``fit(10)`` and ``extend(20)`` are ``fit(30)``.

    Where memory runs out, fewer are drawn at a time, and then by a smaller plan; the report notes it.

    Parameters
    ----------
    n_samples : int
        How many samples to add.
    progress : bool
        Show a progress bar, on a terminal.

    Returns
    -------
    ProjectedPosterior
        The posterior itself. After ``load``, a copy or ``release`` it needs :meth:`prepare` first.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> posterior.extend(5).n_samples
    15
    """
    if (n_samples := whole(n_samples)) < 1:
        msg = f"n_samples must be at least 1, not {n_samples}."
        raise SettingsError(msg)
    posterior: Any = self
    request, plan = attrgetter("request", "plan")(posterior._need_prepared())
    wanted, at_once = posterior.n_samples + n_samples, n_samples
    with request.group.one_voice(), Progress(show=progress and request.group.rank == 0) as bar:
        while posterior.n_samples < wanted:
            note = f"memory ran out; extend drew the samples {at_once} at a time" if at_once < n_samples else ""
            n = min(at_once, wanted - posterior.n_samples)
            done = request.group.attempt(partial(_draw_more, posterior, request, plan, n, bar, note))
            if isinstance(done, OutOfMemory) and at_once > 1:
                at_once = (at_once + 1) // 2
            elif isinstance(done, OutOfMemory):
                plan = _smaller(posterior, request, plan, done.error)
            elif done.interrupted:
                break
    return self


def _draw_more(posterior: Any, request: FitRequest, plan: FitPlan, n: int, bar: Progress, note: str) -> fitting.Samples:
    """Draw ``n`` more samples by a plan, and hold them."""
    measured, meter = posterior._need_measured(), Meter(posterior._network.device, bar.phase)
    if posterior._prepared is None or posterior._prepared.plan.key != plan.key:
        posterior.release()  # before another is built
        posterior._prepared = fitting.build(request, plan, meter)
        route = posterior._prepared.jacobian.route
        measured = replace(measured, projector=type(plan.projector).__name__, reason=plan.reason, route=route)
    before, noise = fitting.Samples(posterior.directions, measured), Noise(posterior._base, measured.seed)
    fitted = fitting.draw(posterior._prepared, noise, n, bar, meter, before=before, note=note)
    posterior._take(fitted)
    return fitted


def _smaller(posterior: Any, request: FitRequest, plan: FitPlan, error: BaseException) -> FitPlan:
    try:
        return shrink(replace(request, n_samples=1), plan, error)
    except SettingsError as refusal:
        again = "" if posterior._prepared is not None else " Call prepare(loader) before you extend it again."
        msg = f"{refusal} The posterior keeps the {posterior.n_samples} samples that it has.{again}"
        raise SettingsError(msg) from error


def prepare(
    self: P,
    loader: Any,
    targets: Any = None,
    *,
    projector: str | Projector = "auto",
    tolerance: float | None = None,
    memory_limit: int | str | None = None,
    parallel: str | None = None,
) -> P:
    """Build rows and projector again, for ``extend`` and exact variances after ``load``, a copy or ``release``.

    Parameters
    ----------
    loader, targets : iterable of batches, or inputs and targets
        The training data of the fit, in the same order. Other data are refused.
    projector, memory_limit, parallel
        As for :meth:`fit`.
    tolerance : float, optional
        By default that of the fit.

    Returns
    -------
    ProjectedPosterior
        The posterior itself; its samples do not change.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> posterior.release().prepare(x[:2], y[:2]).extend(5).n_samples
    15
    """
    posterior: Any = self
    measured, data = posterior._need_measured(), loader if targets is None else (loader, targets)
    posterior._network.check_unchanged()
    rtol, n = measured.tolerance if tolerance is None else tolerance, posterior.n_samples
    with sharing(parallel) as shared:
        source = fitting.own_source(replace(posterior._source, likelihood=posterior._likelihood), shared)
        network = source.network
        if posterior._network.division is not None and network.division is None:
            msg = 'The processes divide the parameters of this posterior: prepare(..., parallel="parameters").'
            raise SettingsError(msg)
        asked = fitting.make_request(source, data, shared, n, projector, rtol, memory_limit)
        check_same_data(asked.rows, measured)
        if posterior._network.division is None and network.division is not None:
            posterior._directions = network.own_columns(posterior.directions).clone()
        posterior._network = network
        posterior.release()._likelihood = asked.rows.likelihood
        meter = Meter(asked.rows.device)
        posterior._prepared = within_memory(asked, make_plan(asked), lambda plan: fitting.build(asked, plan, meter))
    return self


def check_same_data(rows: JacobianRows, measured: Measured) -> None:
    """Refuse the rows of other data than a posterior was fitted to."""
    n_rows = rows.examples.n_all * rows.rows_per_example
    if n_rows != measured.n_rows:
        msg = f"The posterior was fitted to {measured.n_rows} rows, these data have {n_rows}: pass those again."
        raise DataError(msg)
    if rows.examples.fingerprint() != measured.data:
        msg = "These are other data than the posterior was fitted to: pass those again, in the same order."
        raise DataError(msg)
