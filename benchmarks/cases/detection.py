"""After ``calibrate``, the default is within 0.01 of the best detector on each network of a run, and best on average.

Networks of several kinds, each with data sets that it never saw. Every method is fitted to the same network and judged
by the AUROC between test data and strangers:

- both projected posteriors: after ``calibrate`` on held-out data (``calibrated``), and by every other score, of which
  ``entropy`` is the default before;
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, result
from benchmarks.tasks import PARTS
from nullbayes.experiments.judging import DETECTORS, POSTERIORS, Fitted, decisions, evaluated, fit, fitters
from nullbayes.experiments.tasks import Task

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

DEFAULT = "entropy"  # the score of a posterior that is not calibrated
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
                    more, rates, said = measure(own, task)
                    found, decided, notes = found + more, decided + rates, notes + said
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
    rows, decided, notes = list[Row](), list[Row](), list[str]()
    for name in fitters(task, settings.options, settings.seed):
        if settings.options.only and name not in settings.options.only.split("+"):
            continue
        try:
            fitted = fit(settings, task, settings.options, name)
        except (nb.errors.NullBayesError, torch.OutOfMemoryError) as error:
            notes.append(f"{name} on {task.name}: {str(error).splitlines()[0]}")
            continue
        evaluation = evaluated(task, name, fitted.method)
        if name in POSTERIORS.values():
            decided.append(decision_row(task.name, name, settings.seed, decisions(task, fitted.method, evaluation)))
        rows += _aurocs(settings, task, fitted, evaluation)
    return rows, decided, notes


def _aurocs(settings: Settings, task: Task, fitted: Fitted, evaluation: nb.Evaluation) -> Iterator[Row]:
    """Yield the AUROC of each score of a method; a detector is its score."""
    for row in evaluation.rows:
        aurocs = {stranger: figures.auroc for stranger, figures in row.strangers.items()}
        print(f"{task.name}, seed {settings.seed}, {row.name} ({fitted.seconds:.1f} s): {aurocs}", flush=True)
        for found in auroc_rows(task.name, fitted.name, row.score, settings.seed, aurocs):
            yield {**found, "fit_seconds": fitted.seconds}


def auroc_rows(network: str, method: str, score: str, seed: int, aurocs: Mapping[str, float]) -> Iterator[Row]:
    """Yield a row for each set of strangers; a detector is its score."""
    called = method if method in DETECTORS else f"{method}, {score}"
    for stranger, auroc in aurocs.items():
        yield {"column": f"{network} → {stranger}", "method": called, "seed": seed, "auroc": auroc}


def decision_row(network: str, method: str, seed: int, found: Mapping[str, Any]) -> Row:
    """Return rates of alarm, and the coverage and size of label sets, in one row."""
    row: Row = {"network": network, "method": method, "seed": seed}
    row |= {f"flagged at {level}": share for level, share in found["alarms"].items()}
    for i, (stranger, shares) in enumerate(found["flagged"].items(), 1):
        row[f"stranger {i}"] = stranger
        row |= {f"stranger {i} at {level}": share for level, share in shares.items()}
    row["weights"] = ", ".join(f"{k} {v:.2f}" for k, v in found["weights"].items())
    for who, sets in (("set", found["sets"]), ("network's set", found["network_sets"])):
        row |= {f"{who} covers": sets["coverage"], f"{who} size": sets["size"]}
    return row


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
