"""More samples of a posterior that has some: ``extend`` is a method of the projected posteriors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from nullbayes.errors import SettingsError
from nullbayes.limits import OutOfMemory
from nullbayes.posteriors import fitting
from nullbayes.posteriors.arguments import Noise, whole
from nullbayes.posteriors.parallel import one_voice
from nullbayes.posteriors.plan import FitPlan, FitRequest, shrink
from nullbayes.posteriors.progress import Meter, Progress

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
    with one_voice(request.group), Progress(show=progress and request.group.rank == 0) as bar:
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


def _draw_more(posterior: Any, request: FitRequest, plan: FitPlan, n: int, bar: Progress, note: str) -> fitting.Fitted:
    """Draw ``n`` more samples by a plan, and hold them."""
    measured, meter = posterior._need_measured(), Meter(posterior._network.device, bar.phase)
    if posterior._prepared is None or posterior._prepared.plan.key != plan.key:
        posterior.release()  # before another is built
        posterior._prepared = fitting.build(request, plan, meter)
        route = posterior._prepared.jacobian.route
        measured = replace(measured, projector=type(plan.projector).__name__, reason=plan.reason, route=route)
    before, noise = fitting.Fitted(posterior.directions, measured), Noise(posterior._base, measured.seed)
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
