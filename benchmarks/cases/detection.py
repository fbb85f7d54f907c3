"""After ``calibrate``, the default score is within 0.01 of the best detector on every network, and the best on average.

Networks of several kinds, each with data sets that it never saw. Every method is fitted to the same network and judged
by the AUROC between test data and strangers:

- both projected posteriors: after ``calibrate`` on held-out data (``calibrated``), and by every other score, of which
  ``generalized_entropy`` is the default before;
- the baselines, each by every score that it has, with the prior precision chosen by held-out likelihood;
- the detectors of ``nb.detectors``, and temperature scaling.

Held-out data are neither trained on nor scored, and no choice sees the strangers. The claim is about the rows
``ProjectedPosterior, calibrated`` (``LossProjectedPosterior`` where only that was fitted to more than the last layer):
in each column within 0.01 of the best detector, with the highest mean over the columns; and without ``calibrate``
nowhere below the largest probability. Deep ensembles and SWAG train more networks, where this network was trained here.

A second table is about decisions: the share of familiar test inputs that are flagged at three levels, the share of
strangers, and how often label sets at 90 % hold the right label, with their size, beside plain split conformal
prediction with the network's own probabilities.

``parts`` are networks (``benchmarks/tasks.py``), and ``runs`` counts the seeds of those that are trained here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, result
from benchmarks.rivals import methods
from benchmarks.tasks import PARTS
from nullbayes.experiments.measuring import Clock
from nullbayes.experiments.methods import Bench
from nullbayes.experiments.tasks import Task, batches

_ALL = "digits+batchnorm+lenet+resnet20+svhn+minilm"
SMALL = {
    "parts": "batchnorm", "runs": 1, "test": 60, "held_out": 60, "digits_n": 60, "digits_steps": 60,
    "batchnorm_epochs": 5, "lenet_data": "mnist", "lenet_n": "60", "lenet_epochs": 2, "resnet_n": 10,
    "resnet_parameters": "linear.*", "svhn_epochs": 1, "minilm": "", "minilm_parameters": "head.*", "minilm_n": 60,
    "minilm_epochs": 1, "minilm_length": 16, "samples": 4, "members": 2, "budget": 10,
    "only": "ProjectedPosterior+LossProjectedPosterior+MAP+SCOD+DeepEnsemble+MSP+KNN+GradPCA+TemperatureScaling",
}  # fmt: skip
FULL = {
    "parts": _ALL, "runs": 3, "test": 2000, "held_out": 1000, "digits_n": 1000, "digits_steps": 1200,
    "batchnorm_epochs": 40, "lenet_data": "fashion-mnist+mnist", "lenet_n": "2000", "lenet_epochs": 60,
    "resnet_n": 150, "resnet_parameters": "layer3.*+linear.*", "svhn_epochs": 40, "minilm": "",
    "minilm_parameters": "bert.encoder.layer.5.*+head.*", "minilm_n": 600, "minilm_epochs": 12, "minilm_length": 32,
    "samples": 30, "members": 5, "budget": 300, "only": "",
}  # fmt: skip
CUDA = {"lenet_n": "60000", "resnet_n": 6000, "resnet_parameters": "*", "minilm_n": 15_000, "minilm_epochs": 6}

DETECTORS = (
    "MSP", "MaxLogit", "Energy", "GEN", "KNN", "Mahalanobis", "RelativeMahalanobis", "ViM", "ReAct", "SCALE", "FDBD",
    "NNGuide", "GradPCA",
)  # fmt: skip
PROJECTED = {"output": "ProjectedPosterior", "loss": "LossProjectedPosterior"}
DEFAULT = "generalized_entropy"  # the score of a posterior that is not calibrated
LEVELS = (0.01, 0.05, 0.1)
SETS = 0.1
CLOSE = 0.01  # what the claim allows beside the best detector of a column
PUBLISHED = ("resnet20",)  # which are not trained here, so that one run is enough
Row = dict[str, Any]


def run(settings: Settings) -> dict[str, Any]:
    """Measure one network after the other; the table has means over the runs."""
    wanted, found, decided, notes = settings.options.parts.split("+"), list[Row](), list[Row](), list[str]()
    if odd := next((part for part in wanted if part not in PARTS), None):
        msg = f"There is no part {odd!r}: there are {', '.join(PARTS)}."
        raise Skipped(msg)
    for part in wanted:
        for seed in range(1 if part in PUBLISHED else settings.options.runs):
            own = replace(settings, seed=settings.seed + seed)
            try:
                for task in PARTS[part](own):
                    more, decisions, said = measure(own, task)
                    found, decided, notes = found + more, decided + decisions, notes + said
            except Skipped as reason:
                notes.append(f"{part} is left out. {reason}")
                break
    if not found:
        raise Skipped(" ".join(notes))
    table = means(found)
    judged = _judged(table)
    return {**result(table, judged, holds=_holds(judged), notes=notes), "decisions": decided, "each": found}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(settings: Settings, task: Task) -> tuple[list[Row], list[Row], list[str]]:
    """Return the AUROC of every method and score against every set, the decisions, and notes."""
    rows, decisions, notes = list[Row](), list[Row](), list[str]()
    assert task.held_out is not None
    for name, make in _methods(settings, task):
        if settings.options.only and name not in settings.options.only.split("+"):
            continue
        try:
            with Clock(settings.device) as fitting:
                method = make()
        except (nb.errors.NullBayesError, torch.OutOfMemoryError) as error:
            notes.append(f"{name} on {task.name}: {str(error).splitlines()[0]}")
            continue
        if name in PROJECTED.values():
            method.calibrate(batches(task.held_out))
            decisions.append(_decisions(settings, task, name, method))
        rows += _aurocs(settings, task, name, method, fitting.seconds)
    return rows, decisions, notes


def _aurocs(settings: Settings, task: Task, name: str, method: Any, seconds: float) -> Iterator[Row]:
    """Yield the AUROC of each score of a method; a detector is its score."""
    asked = None if name in DETECTORS else "all"
    found = nb.evaluate({name: method}, batches(task.test), dict(task.strangers), scores=asked)
    for row in found.rows:
        called = name if name in DETECTORS else f"{name}, {row.score}"
        aurocs = {stranger: figures.auroc for stranger, figures in row.strangers.items()}
        print(f"{task.name}, seed {settings.seed}, {called} ({seconds:.1f} s): {aurocs}", flush=True)
        for stranger, auroc in aurocs.items():
            where = {"column": f"{task.name} → {stranger}", "seed": settings.seed, "fit_seconds": seconds}
            yield {**where, "method": called, "auroc": auroc}


def _decisions(settings: Settings, task: Task, name: str, method: Any) -> Row:
    """Return rates of alarm, and the coverage and size of label sets."""
    y = task.test[1]
    row: Row = {"network": task.name, "method": name, "seed": settings.seed}
    familiar = method.p_value(task.test[0])
    row |= {f"flagged at {level:g}": float((familiar <= level).double().mean()) for level in LEVELS}
    for i, (stranger, strange) in enumerate(task.strangers.items(), 1):
        p = method.p_value(strange)
        row |= {f"stranger {i}": stranger} | {
            f"stranger {i} at {level:g}": float((p <= level).double().mean()) for level in LEVELS
        }
    row["weights"] = ", ".join(f"{k} {v:.2f}" for k, v in method.calibration.weights.items())
    network = nb.baselines.MAP(task.model).fit(batches(task.train)[:4])  # which learns nothing from them
    network.calibrate(batches(task.held_out))  # type: ignore[arg-type]
    for who, decides in (("set", method), ("network's set", network)):
        sets = decides.predict_set(task.test[0], SETS)
        row |= {
            f"{who} covers": float(sets[torch.arange(len(y), device=y.device), y].double().mean()),
            f"{who} size": float(sets.double().sum(1).mean()),
        }
    return row


# --- methods ----------------------------------------------------------------------------------------------------------


def _methods(settings: Settings, task: Task) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Iterate over names, and functions that return the fitted method."""
    for rows, name in PROJECTED.items():
        yield name, partial(_projected, settings, task, rows, name)
    bench = _bench(settings, task)
    for name in methods(bench):
        if hasattr(nb.baselines, name):
            yield name, partial(_baseline, bench, name)
    for name in DETECTORS:
        yield name, partial(_detector, task, name)
    yield "TemperatureScaling", partial(_temperature, task)


def _projected(settings: Settings, task: Task, rows: str, name: str) -> Any:
    posterior = getattr(nb, name)(task.model, parameters=task.parameters.get(rows))
    return posterior.fit(batches(task.train), settings.options.samples, generator=settings.generator(), progress=False)


def _bench(settings: Settings, task: Task) -> Bench:
    assert task.held_out is not None
    o, free = settings.options, task.parameters.get("loss")
    data = ([task.train], batches(task.held_out))
    return Bench(task.model, *data, o.samples, o.members, o.budget, settings.seed, free, task.member)


def _baseline(bench: Bench, name: str) -> Any:
    made = methods(bench)[name]()
    made.fit()
    made.tune()
    return made.posterior


def _detector(task: Task, name: str) -> Any:
    free = {"parameters": task.parameters.get("output")} if name == "GradPCA" else {}  # the others take no gradients
    return getattr(nb.detectors, name)(task.model, **free).fit(batches(task.train))


def _temperature(task: Task) -> Any:
    assert task.held_out is not None
    return nb.baselines.TemperatureScaling(task.model).fit(batches(task.held_out))


# --- tables -----------------------------------------------------------------------------------------------------------


def means(found: Iterable[Row]) -> list[Row]:
    """Return one row per method and score: the mean over runs for each column, and the mean over the columns."""
    found = list(found)
    columns = list(dict.fromkeys(row["column"] for row in found))
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        own = [row for row in found if row["method"] == method]
        values = {c: [row["auroc"] for row in own if row["column"] == c] for c in columns}
        means = {c: statistics.fmean(v) if v else None for c, v in values.items()}
        there = [mean for mean in means.values() if mean is not None]
        rows.append(
            {"method": method, **means, "mean": statistics.fmean(there) if len(there) == len(columns) else None}
        )
    return rows


def _judged(table: list[Row]) -> dict[str, float | None]:
    """Return how far the calibrated posterior is from the best detector, and the default from the network."""
    by = {row["method"]: row for row in table}
    columns = [name for name in table[0] if name not in ("method", "mean")]
    ours = {c: _ours(by, c, "calibrated") for c in columns}
    plain = {c: _ours(by, c, DEFAULT) for c in columns}
    rivals = [by[name] for name in DETECTORS if name in by]
    judged: dict[str, float | None] = {}
    for c in columns:
        best = max((row[c] for row in rivals if row[c] is not None), default=None)
        if best is not None and ours[c] is not None:
            judged[f"{c}: calibrated - best detector"] = ours[c] - best
        if "MSP" in by and by["MSP"][c] is not None and plain[c] is not None:
            judged[f"{c}: default - largest probability"] = plain[c] - by["MSP"][c]
    means = [row["mean"] for row in rivals if row["mean"] is not None]
    if means and all(value is not None for value in ours.values()):
        mean, best = statistics.fmean(ours.values()), max(means)  # type: ignore[arg-type]
        judged |= {"mean: calibrated - best detector": mean - best, "mean: calibrated/best detector": mean / best}
    return judged


def _ours(by: Mapping[str, Row], column: str, label: str) -> float | None:
    """Return the projected posterior's figure; the loss-projected one's where the other had the last layer alone."""
    first = "LossProjectedPosterior" if column.startswith("MiniLM") else "ProjectedPosterior"
    row = by.get(f"{first}, {label}", {})
    value: float | None = row.get(column)
    return value


def _holds(judged: Mapping[str, float | None]) -> bool:
    found = {name: value for name, value in judged.items() if value is not None}
    close = all(value >= -CLOSE for name, value in found.items() if "best detector" in name and "mean" not in name)
    above = all(value >= -1e-9 for name, value in found.items() if "largest" in name)
    return close and above and found.get("mean: calibrated - best detector", -math.inf) >= 0.0
