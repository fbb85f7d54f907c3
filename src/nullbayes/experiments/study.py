"""One trained network and every method: fit, calibrate, judge, decide, shift. The studies of classifiers share this.

A study has subjects: networks with their data (`Subject`). For each seed of a subject, and for each method, one step
fits the method and measures all that the page shows of it, so that a run that is killed loses one method at most.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

import nullbayes as nb
from nullbayes.experiments.findings import as_results
from nullbayes.experiments.frame import FAILURES, Mixed, Results, Settings, failure
from nullbayes.experiments.gathering import Gathered, summary
from nullbayes.experiments.judging import (
    POSTERIORS,
    Fitted,
    calibrated_scores,
    decisions,
    evaluated,
    fit,
    fitters,
    judged,
)
from nullbayes.experiments.measuring import Clock
from nullbayes.experiments.packing import packed_gallery
from nullbayes.experiments.shifts import Shift
from nullbayes.experiments.tasks import Inputs, Task, take
from nullbayes.page import gallery

_LEFT_OUT = "It was left out by --methods; the same command without it runs the rest."
_PAUSE = 1.0  # seconds between looks at what other processes have done
SHIFTED = ("MAP", *POSTERIORS.values(), "LastLayerLaplace", "DiagonalLaplace", "SWAG")


@dataclass(frozen=True)
class Sizes:
    """How large a study is.

    Attributes
    ----------
    n : int
        Training examples that are rows.
    epochs : int
        Of training; 0 for the usual number.
    held_out, test : int
        Examples to calibrate with, and to judge by; at most ``test`` strangers of each set.
    shifted : int
        Test examples that are shifted.
    samples, members, budget : int
        Samples of each posterior, networks of a deep ensemble, vectors of low-rank methods.
    curvature : int or None
        Training examples that the curvature of the baselines is computed from; all of ``n`` by default.
    pictures : int
        In each row of the gallery.
    patience : float
        Seconds that the fit of a posterior may take by `nullbayes.plan`; beyond, it is left out, and the page says so.
    only : tuple of str
        Methods; all where it is empty.
    """

    n: int
    epochs: int
    held_out: int
    test: int
    shifted: int
    samples: int = 30
    members: int = 5
    budget: int = 300
    curvature: int | None = None
    pictures: int = 6
    patience: float = 3600.0
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """A network that is studied, with its data.

    Attributes
    ----------
    name : str
        Of network and data, such as "LeNet, mnist".
    task : callable
        Trains or loads the network of a seed.
    show : callable
        Makes what the gallery shows of one input: an image (h, w) or (3, h, w) between 0 and 1, or a text.
    data : str
        The name of the data in the paper's tables; empty where the paper has none.
    shifts : tuple of Shift
        By which test inputs are changed.
    seeds : int or None
        At most so many: 1 for a network that was not trained here.
    only : tuple of str
        The methods that this subject is about; all where it is empty.
    gallery_by : str
        The posterior whose p-values the gallery shows.
    """

    name: str
    task: Callable[[Settings], Task]
    show: Callable[[Inputs], Tensor | str]
    data: str = ""
    shifts: tuple[Shift, ...] = ()
    seeds: int | None = None
    only: tuple[str, ...] = ()
    gallery_by: str = "ProjectedPosterior"


# --- the whole study --------------------------------------------------------------------------------------------------


def run_study(settings: Settings, subjects: Sequence[Subject], sizes: Sizes) -> Results:
    """Do every step of every subject and seed, and return all that was measured."""
    if settings.earlier is not None:
        take_over(settings, subjects, sizes)
    while True:
        found = [_run_subject(settings, subject, sizes) for subject in subjects]
        if None not in found:
            return {"sizes": asdict(sizes), "subjects": found}
        time.sleep(_PAUSE)  # other processes, started with the same command, are at the steps that are left


def take_over(settings: Settings, subjects: Sequence[Subject], sizes: Sizes) -> None:
    """Put the steps of the earlier run, which must have the same sizes, where this one looks for its own.

    Each record says of which commit it is. Methods that the earlier run has left out, or that ran out of memory there,
    are not taken.
    """
    assert settings.earlier is not None
    assert settings.store is not None
    found, commit, taken = settings.earlier["results"], settings.earlier["environment"]["commit"], 0
    if found["sizes"] != json.loads(json.dumps(asdict(sizes))):
        msg = "The earlier results are of a study of other sizes (n, epochs, samples, ...; or --quick): leave them out."
        raise Mixed(msg)
    names = [subject.name for subject in subjects]
    for subject in found["subjects"]:
        for run in subject["runs"] if subject["name"] in names else ():
            key = _key(subject["name"], run["seed"])
            taken += settings.store.put(f"{key}/network", run["network"], 0.0)
            for name, record in run["methods"].items():
                if not record.get("again"):
                    seconds = record.get("fit_seconds", 0.0) + record.get("judge_seconds", 0.0)
                    taken += settings.store.put(f"{key}/{name}", {"note": f"At commit {commit}.", **record}, seconds)
    settings.store.say(f"{taken} steps are taken from the earlier results.")


def _key(subject: str, seed: int) -> str:
    """Return the name of what is done with one network."""
    return f"{subject}/seed {seed}"


def _run_subject(settings: Settings, subject: Subject, sizes: Sizes) -> Results | None:
    seeds = settings.each_seed()[: subject.seeds]
    runs = [_run_seed(own, subject, sizes, own is seeds[0]) for own in seeds]
    if None in runs:
        return None
    shifts = {shift.name: shift.unit for shift in subject.shifts}
    found: Results = {"name": subject.name, "data": subject.data, "shifts": shifts, "runs": runs}
    gathered = Gathered(found)
    return {"summary": summary(gathered), "findings": as_results(gathered), **found}


def _run_seed(settings: Settings, subject: Subject, sizes: Sizes, first: bool) -> Results | None:
    """Return the network's facts and what each method gave; None if other processes are at some of the steps.

    The network is made when a step needs it.
    """
    key, make = _key(subject.name, settings.seed), functools.cache(lambda: subject.task(settings))
    network = settings.attempt(f"{key}/network", lambda: _network(make(), sizes, settings.seed, subject.only))
    if network is None:
        return None
    found: dict[str, Results | None] = {}
    for name in network["methods"]:
        work = functools.partial(_judged_step, settings, subject, sizes, make, name, first)
        if _wanted(name, settings.methods):
            found[name] = settings.attempt(f"{key}/{name}", work)
        else:
            found[name] = settings.done(f"{key}/{name}") or {"failed": _LEFT_OUT, "again": True}
    return None if None in found.values() else {"seed": settings.seed, "network": network, "methods": found}


def _network(task: Task, sizes: Sizes, seed: int, only: Sequence[str]) -> Results:
    """Return what there is: sizes of the data, and the methods that apply."""
    assert task.held_out is not None
    names = [name for name in fitters(task, sizes, seed) if _wanted(name, sizes.only) and _wanted(name, only)]
    sets = {"rows": len(task.train[1]), "held out": len(task.held_out[1]), "test": len(task.test[1])}
    return {
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "examples": sets | {name: _length(x) for name, x in task.strangers.items()},
        "free": {rows: list(globs) for rows, globs in task.parameters.items()},
        "strangers": list(task.strangers),
        "methods": names,
    }


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or name in only


def _judged_step(
    settings: Settings, subject: Subject, sizes: Sizes, make: Callable[[], Task], name: str, first: bool
) -> Results:
    """Fit one method and measure everything; a method that cannot be fitted says why."""
    task = make()
    try:
        fitted = fit(settings, task, sizes, name)
    except FAILURES as error:
        return failure(error)
    with Clock(settings.device) as judging:
        evaluation = evaluated(task, name, fitted.method)
        found = judged(task, fitted, evaluation)
        if name in POSTERIORS.values():
            found["decisions"] = decisions(task, fitted.method, evaluation)
            found["report"] = _report(fitted.method.report)
        if name in SHIFTED and subject.shifts:
            found["shift"] = _shifted(task, fitted, subject.shifts, sizes.shifted)
        if first and name == subject.gallery_by:
            found["gallery"] = _galleries(task, fitted.method.calibration, evaluation, subject.show, sizes.pictures)
    return {"fit_seconds": fitted.seconds, "judge_seconds": judging.seconds, **found}


def _report(report: Any) -> Results:
    """Return what the fit of a posterior measured."""
    names = ("n_rows", "n_parameters", "kernel_dimension", "kernel_dimension_stderr", "prior_precision", "train_std")
    found = {name: getattr(report, name) for name in names}
    return found | {"residual": max(report.residual), "projector": report.projector, "sweeps": report.sweeps}


def _length(x: Inputs) -> int:
    return len(x if isinstance(x, Tensor) else next(iter(x.values())))


# --- shifts and pictures ----------------------------------------------------------------------------------------------


def _shifted(task: Task, fitted: Fitted, shifts: Sequence[Shift], most: int) -> Results:
    """Return accuracy, ECE and NLL at every strength of every shift."""
    x, y = take(task.test[0], slice(most)), task.test[1][:most]
    assert isinstance(x, Tensor)
    found: dict[str, list[dict[str, float]]] = {}
    for shift in shifts:
        found[shift.name] = []
        for strength in shift.strengths:
            probs = fitted.probs(shift.apply(x, strength))
            metrics = {metric: getattr(nb.metrics, metric)(probs, y) for metric in ("accuracy", "ece", "nll")}
            found[shift.name].append({"strength": strength, **metrics})
    return found


def _galleries(
    task: Task, calibration: Any, found: nb.Evaluation, show: Callable[[Inputs], Tensor | str], most: int
) -> list[dict[str, Any]]:
    """Return the strangest and the least strange inputs of each set with their p-values."""
    made, inputs = [], {"test": task.test[0], **task.strangers}
    for name, scores in calibrated_scores(found).items():
        x, p, order = inputs[name], calibration.p_value(scores), scores.argsort(descending=True)
        for what, index in (("strangest", order[:most]), ("most certain", order.flip(0)[:most])):
            shown = [show(take(x, int(i))) for i in index]
            labels = [f"p = {value:.3g}" for value in p[index].tolist()]
            made.append(packed_gallery(gallery(f"{name}: the {what}", shown, labels)))
    return made
