"""After ``calibrate``, the default score is within 0.01 of the best detector on every network, and the best on average.

Networks of several kinds, each with data sets that it never saw. Every method is fitted to the same network and judged
by the AUROC between test data and strangers:

- both projected posteriors: as they come (``default``), after ``calibrate`` on held-out data (``calibrated``), and by
  every other score;
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, result
from benchmarks.measure import Clock
from benchmarks.rivals import Bench, methods
from benchmarks.tasks import PARTS, Inputs, Task, batches
from nullbayes.predictive import SCORES, default_score, score

_ALL = "digits+batchnorm+lenet+resnet20+svhn+minilm"
SMALL = {
    "parts": "digits+batchnorm", "runs": 1, "test": 60, "held_out": 60, "digits_n": 60, "digits_steps": 60,
    "batchnorm_epochs": 5, "lenet_data": "mnist", "lenet_n": "60", "lenet_epochs": 2, "resnet_n": 10,
    "resnet_parameters": "linear.*", "svhn_epochs": 1, "minilm": "", "minilm_parameters": "head.*", "minilm_n": 60,
    "minilm_epochs": 1, "minilm_length": 16, "samples": 4, "members": 2, "budget": 10, "only": "",
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
PROJECTED = {"output": nb.ProjectedPosterior, "loss": nb.LossProjectedPosterior}
LEVELS = (0.01, 0.05, 0.1)
SETS = 0.1
CLOSE = 0.01  # what the claim allows beside the best detector of a column
PUBLISHED = ("resnet20",)  # which are not trained here, so that one run is enough
Row = dict[str, Any]


def run(settings: Settings) -> dict[str, Any]:
    """Measure one network after the other, and take the mean over the runs."""
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
    table = _table(found)
    judged = _judged(table)
    return {**result(table, judged, holds=_holds(judged), notes=notes), "decisions": _means(decided), "each": found}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(settings: Settings, task: Task) -> tuple[list[Row], list[Row], list[str]]:
    """Return the AUROC of every method and score against every set, the decisions, and notes."""
    rows, decisions, notes = list[Row](), list[Row](), list[str]()
    for name, make in _methods(settings, task):
        if settings.options.only and name not in settings.options.only.split("+"):
            continue
        try:
            with Clock(settings.device) as fitting:
                method, kinds, pred_type = make()
        except (nb.errors.NullBayesError, torch.OutOfMemoryError, NotImplementedError) as error:
            notes.append(f"{name} on {task.name}: {str(error).splitlines()[0]}")
            continue
        seconds = fitting.seconds
        print(f"{task.name}, seed {settings.seed}: {name} was fitted in {seconds:.1f} s", flush=True)
        if "calibrated" in kinds:
            assert task.held_out is not None
            method.calibrate(batches(task.held_out))
            decisions.append(_decisions(settings, task, name, method))
        rows += _aurocs(settings, task, name, method, kinds, pred_type, seconds)
    return rows, decisions, notes


def _aurocs(
    settings: Settings,
    task: Task,
    name: str,
    method: Any,
    kinds: Mapping[str, str | None],
    pred_type: str | None,
    seconds: float,
) -> Iterator[Row]:
    inside = _scores(method, task.test[0], kinds, pred_type)
    for stranger, x in task.strangers.items():
        outside = _scores(method, x, kinds, pred_type)
        for label in kinds:
            row: Row = {"column": f"{task.name} → {stranger}", "seed": settings.seed, "fit_seconds": seconds}
            auroc = nb.metrics.auroc(inside[label], outside[label])
            yield {**row, "method": f"{name}, {label}" if label else name, "auroc": auroc}


def _scores(method: Any, x: Inputs, kinds: Mapping[str, str | None], pred_type: str | None) -> dict[str, Tensor]:
    """Return all scores of some inputs, from one prediction as far as they follow from it."""
    asked = {} if pred_type is None else {"pred_type": pred_type}
    prediction = method.predict(x, **asked) if set(kinds.values()) & set(SCORES) else None
    return {
        label: score(prediction, method.likelihood, kind) if kind in SCORES else method.ood_score(x, kind)  # type: ignore[arg-type]
        for label, kind in kinds.items()
    }


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
    network = nb.baselines.MAP(method._network.model).fit(*_few(task))
    network.calibrate(batches(task.held_out))  # type: ignore[arg-type]
    for who, decides in (("set", method), ("network's set", network)):
        sets = decides.predict_set(task.test[0], SETS)
        row |= {
            f"{who} covers": float(sets[torch.arange(len(y), device=y.device), y].double().mean()),
            f"{who} size": float(sets.double().sum(1).mean()),
        }
    return row


def _few(task: Task) -> tuple[list[Any]]:
    """Return a few of the training data: plain conformal prediction learns nothing from them."""
    return (batches(task.train)[:4],)


# --- methods ----------------------------------------------------------------------------------------------------------


def _methods(settings: Settings, task: Task) -> Iterator[tuple[str, Callable[[], tuple[Any, Mapping[str, Any], Any]]]]:
    """Iterate over names, and functions that fit a method and return it with its scores and its kind of prediction."""
    for rows, kind in PROJECTED.items():
        yield kind.__name__, lambda rows=rows, kind=kind: _projected(settings, task, rows, kind)
    bench = _bench(settings, task)
    for name in methods(bench):
        trained = name in ("SWAG", "DeepEnsemble")
        if name not in (kind.__name__ for kind in PROJECTED.values()) and (task.build is not None or not trained):
            yield name, lambda name=name: _baseline(bench, name)
    for name in DETECTORS:
        yield name, lambda name=name: _detector(task, name)
    yield "TemperatureScaling", lambda: _temperature(task)


def _projected(settings: Settings, task: Task, rows: str, kind: Any) -> tuple[Any, Mapping[str, Any], Any]:
    posterior = kind(task.model, parameters=task.parameters.get(rows))
    posterior.fit(batches(task.train), settings.options.samples, generator=settings.generator(), progress=False)
    others = ("max_variance", "relative_variance", "mutual_information", "entropy", "max_prob_variance", "energy")
    return (
        posterior,
        {"default": default_score(posterior.likelihood), **{name: name for name in others}, "calibrated": "combined"},
        None,
    )


def _bench(settings: Settings, task: Task) -> Bench:
    assert task.held_out is not None
    o, (x, y) = settings.options, task.train
    build = task.build or (lambda: task.model)
    data = ([(x, y)], batches(task.held_out))
    free = task.parameters.get("loss")
    return Bench(task.model, build, *data, o.samples, o.members, task.epochs, o.budget, settings.seed, free)


def _baseline(bench: Bench, name: str) -> tuple[Any, Mapping[str, Any], Any]:
    made = methods(bench)[name]()
    made.fit()
    made.tune()
    if not isinstance(made.posterior, nb.baselines.Baseline):
        raise NotImplementedError(name)
    return made.posterior, {kind: kind for kind in made.posterior.scores if kind != "combined"}, made.pred_type


def _detector(task: Task, name: str) -> tuple[Any, Mapping[str, Any], Any]:
    free = {"parameters": task.parameters.get("output")} if name == "GradPCA" else {}  # the others take no gradients
    return getattr(nb.detectors, name)(task.model, **free).fit(batches(task.train)), {"": None}, None


def _temperature(task: Task) -> tuple[Any, Mapping[str, Any], Any]:
    assert task.held_out is not None
    scaled = nb.baselines.TemperatureScaling(task.model).fit(batches(task.held_out))
    return scaled, {kind: kind for kind in ("max_probability", "entropy", "generalized_entropy")}, None


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(found: list[Row]) -> list[Row]:
    """Return one row per method and score: the mean over runs for each column, and the mean over the columns."""
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


def _means(decided: list[Row]) -> list[Row]:
    """Return the decisions of each network and method: the mean over runs."""
    rows = []
    for key in dict.fromkeys((row["network"], row["method"]) for row in decided):
        own = [row for row in decided if (row["network"], row["method"]) == key]
        numbers = {k: statistics.fmean(row[k] for row in own) for k, v in own[0].items() if isinstance(v, float)}
        rows.append({**own[0], **numbers, "seed": len(own)})
    return rows


def _judged(table: list[Row]) -> dict[str, float | None]:
    """Return how far the calibrated posterior is from the best detector, and the default from the network."""
    by = {row["method"]: row for row in table}
    columns = [name for name in table[0] if name not in ("method", "mean")]
    ours = {c: _ours(by, c, "calibrated") for c in columns}
    plain = {c: _ours(by, c, "default") for c in columns}
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
        judged["mean: calibrated - best detector"] = statistics.fmean(ours.values()) - max(means)  # type: ignore[arg-type]
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
