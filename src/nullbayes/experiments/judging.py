"""Every method on one trained network: how it is fitted and calibrated, how it is judged, what it decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.experiments import paper
from nullbayes.experiments.frame import Results, Settings
from nullbayes.experiments.measuring import Clock
from nullbayes.experiments.methods import Bench, methods
from nullbayes.experiments.packing import rounded
from nullbayes.experiments.tasks import Inputs, Task, batches, logits_of, take, thinned
from nullbayes.page import evaluation_summary

POSTERIORS = {"output": "ProjectedPosterior", "loss": "LossProjectedPosterior"}  # by their rows
DETECTORS = (
    "MSP", "MaxLogit", "Energy", "GEN", "KNN", "Mahalanobis", "RelativeMahalanobis", "ViM", "ReAct", "SCALE", "FDBD",
    "NNGuide", "GradPCA",
)  # fmt: skip
DRAWN = ("MAP", *POSTERIORS.values())  # whose histograms and reliability are kept
LEVELS = (0.01, 0.05, 0.1)  # of alarms
SETS = 0.1  # share of label sets that may miss the label
BINS = 15  # of calibration errors
LARGEST_EXACT = 60_000  # parameters or rows whose matrix a GPU factors within minutes
SAMPLED = "max_variance, sampled networks"  # the paper's score of methods that are linearized by default here


@dataclass(frozen=True)
class Fitted:
    """A method after its fit, the way in which it predicts (None: its only one), and the seconds of the fit."""

    name: str
    method: Any
    pred_type: str | None
    seconds: float

    def probs(self, x: Inputs) -> Tensor | None:
        """Return the probabilities of the mean prediction; None for a mere score."""
        if self.name in DETECTORS or not (self.method.n_samples > 0 and hasattr(self.method, "predict")):
            return None
        options = {} if self.pred_type is None else {"pred_type": self.pred_type}
        found: Tensor = self.method.predict(x, **options).probs
        return found


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit(settings: Settings, task: Task, sizes: Any, name: str) -> Fitted:
    """Fit one of `fitters` to a network; the posteriors are calibrated on held-out data.

    ``sizes`` is anything with ``samples``, ``members`` and ``budget``. A method that cannot be fitted to this network
    raises an error of the library.
    """
    assert task.held_out is not None
    with Clock(settings.device) as fitting:
        method, pred_type = fitters(task, sizes, settings.seed)[name]()
    if name in POSTERIORS.values():
        method.calibrate(batches(task.held_out))
    return Fitted(name, method, pred_type, fitting.seconds)


def fitters(task: Task, sizes: Any, seed: int) -> dict[str, Callable[[], tuple[Any, str | None]]]:
    """Return functions by name that fit a method and return it with the way in which the paper predicts with it."""
    assert task.held_out is not None
    data, free = ([task.train], batches(task.held_out)), task.parameters.get("loss")
    few = getattr(sizes, "curvature", None)
    curvature = None if few is None else batches(thinned(task.train, few))
    bench = Bench(task.model, *data, sizes.samples, sizes.members, sizes.budget, seed, free, task.member, curvature)
    table: dict[str, Callable[[], tuple[Any, str | None]]] = {
        name: functools.partial(_posterior, task, rows, sizes, bench) for rows, name in POSTERIORS.items()
    }
    table |= {name: functools.partial(_baseline, bench, name) for name in methods(bench) if name not in table}
    table |= {name: functools.partial(_detector, task, name) for name in DETECTORS}
    return table | {"TemperatureScaling": functools.partial(_temperature, task)}


def _posterior(task: Task, rows: str, sizes: Any, bench: Bench) -> tuple[Any, str | None]:
    """Fit a posterior, if it will not take too long."""
    free, loader = task.parameters.get(rows), batches(task.train)
    if (patience := getattr(sizes, "patience", None)) is not None:
        planned = nb.plan(task.model, loader, sizes.samples, loss=rows == "loss", parameters=free)
        if planned.seconds > patience:
            msg = f"Its fit would take about {planned.seconds:.0f} s, more than the {patience:.0f} s allowed."
            raise nb.errors.SettingsError(msg)
    posterior = getattr(nb, POSTERIORS[rows])(task.model, parameters=free)
    return posterior.fit(loader, sizes.samples, generator=bench.generator(), progress=False), "linearized"


def _baseline(bench: Bench, name: str) -> tuple[Any, str | None]:
    if name == "LinearizedLaplace":
        _check_exact(bench)
    made = methods(bench)[name]()
    made.fit()
    made.tune()
    return made.posterior, made.pred_type


def _check_exact(bench: Bench) -> None:
    """Refuse a full covariance that cannot be factored: each precision that is tried would take conjugate gradients."""
    examples = bench.curvature or bench.loader
    outputs = logits_of(bench.model, take(examples[0][0], slice(1))).shape[1]
    rows = outputs * sum(len(y) for _, y in examples)
    globs = bench.parameters or ("*",)
    names = [(name, p.numel()) for name, p in bench.model.named_parameters()]
    free = sum(size for name, size in names if any(fnmatchcase(name, glob) for glob in globs))
    if min(rows, free) > LARGEST_EXACT:
        msg = (
            f"The matrix of its {free:,} parameters has {8 * free**2 / 1e9:,.0f} GB, that of its {rows:,} rows "
            f"{8 * rows**2 / 1e9:,.0f} GB, and conjugate gradients for every precision that is tried are too slow."
        )
        raise nb.errors.SettingsError(msg)


def _detector(task: Task, name: str) -> tuple[Any, str | None]:
    free = {"parameters": task.parameters.get("output")} if name == "GradPCA" else {}  # the others take no gradients
    return getattr(nb.detectors, name)(task.model, **free).fit(batches(task.train)), None


def _temperature(task: Task) -> tuple[Any, str | None]:
    assert task.held_out is not None
    return nb.baselines.TemperatureScaling(task.model).fit(batches(task.held_out)), None


# --- judging ----------------------------------------------------------------------------------------------------------


def evaluated(task: Task, name: str, method: Any) -> nb.Evaluation:
    """Return how well every score of a method tells strangers from test data; a detector is its score."""
    asked = None if name in DETECTORS else "all"
    return nb.evaluate({name: method}, batches(task.test), dict(task.strangers), scores=asked)


def judged(task: Task, fitted: Fitted, found: nb.Evaluation) -> Results:
    """Return the metrics of the predictions, and AUROC, AUPR and FPR95 of every score against every set of strangers.

    ``found`` is what `evaluated` returned.

    Returns
    -------
    dict
        "familiar" has the metrics, or None for a mere score; "scores" the figures by score and strangers; "default" the
        score that the method has without being asked; "published" the one by which the paper judges it, or None.
    """
    scores = {row.score: {s: _figures(figures) for s, figures in row.strangers.items()} for row in found.rows}
    published = None
    if fitted.name in paper.METHODS:
        published = paper.SCORE.get(fitted.name, "max_variance")
        if fitted.pred_type == "sampled" and "Laplace" in fitted.name:
            published, scores[SAMPLED] = SAMPLED, dict(_by_sampled_networks(task, fitted.method))
    default = _default_score(task, fitted)
    made: Results = {"scores": scores, "default": default, "published": published, "familiar": None}
    y = task.test[1]
    if (probs := fitted.probs(task.test[0])) is not None:
        made["familiar"] = {metric: getattr(nb.metrics, metric)(probs, y) for metric in paper.METRICS}
    if fitted.name in DRAWN:
        row = next(row for row in found.rows if row.score == default)
        histogram = evaluation_summary(found, shown=[row.name])["histograms"][row.name]
        made |= {"histogram": rounded(histogram), "reliability": None if probs is None else _reliability(probs, y)}
    return made


def _figures(detection: Any) -> dict[str, float]:
    return {"auroc": detection.auroc, "aupr": detection.aupr, "fpr95": detection.fpr95}


def _by_sampled_networks(task: Task, method: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the figures of the variance of logits of networks at the samples, which the paper takes for Laplace."""
    inside, *outside = (
        method.ood_score(x, "max_variance", pred_type="sampled") for x in (task.test[0], *task.strangers.values())
    )
    for stranger, scores in zip(task.strangers, outside, strict=True):
        yield stranger, {metric: getattr(nb.metrics, metric)(inside, scores) for metric in ("auroc", "aupr", "fpr95")}


def _default_score(task: Task, fitted: Fitted) -> str:
    """Return the name of the score of a method that is not asked for another: a few inputs tell."""
    few = take(task.test[0], slice(4)), task.test[1][:4]
    stranger, x = next(iter(task.strangers.items()))
    found = nb.evaluate({fitted.name: fitted.method}, few, {stranger: take(x, slice(4))})
    return "calibrated" if getattr(fitted.method, "calibration", None) is not None else found.rows[0].score


def _reliability(probs: Tensor, y: Tensor) -> list[list[float]]:
    """Return for each bin of confidence the number of predictions, of right ones, and the sum of confidences."""
    top, predicted = probs.double().max(1)
    edges = torch.arange(1, BINS, dtype=torch.float64, device=probs.device) / BINS
    index = torch.bucketize(top, edges)
    weights = (torch.ones_like(top), (predicted == y).double(), top)
    sums = [torch.bincount(index, weights=weight, minlength=BINS).tolist() for weight in weights]
    found: list[list[float]] = rounded(sums)
    return found


# --- decisions --------------------------------------------------------------------------------------------------------


def calibrated_scores(found: nb.Evaluation) -> dict[str, Tensor]:
    """Return the scores that a calibrated method decides by, of test inputs ("test") and of strangers by name."""
    row = next(row for row in found.rows if row.score == "calibrated")
    return {"test": row.scores_in, **row.scores_out}


def decisions(task: Task, method: Any, found: nb.Evaluation) -> Results:
    """Return shares of alarms by level on test data and strangers, and the coverage and size of label sets.

    The label sets of plain split conformal prediction with the network's own probabilities are beside.
    """
    assert task.held_out is not None
    network = nb.baselines.MAP(task.model).fit(batches(task.train)[:4])  # which learns nothing from them
    network.calibrate(batches(task.held_out))
    alarms = {name: _alarms(method.calibration.p_value(s)) for name, s in calibrated_scores(found).items()}
    return {
        "alarms": alarms.pop("test"),
        "flagged": alarms,
        "weights": dict(method.calibration.weights),
        "sets": _label_sets(method, task),
        "network_sets": _label_sets(network, task),
    }


def _alarms(p: Tensor) -> dict[str, float]:
    return {f"{level:g}": float((p <= level).double().mean()) for level in LEVELS}


def _label_sets(method: Any, task: Task) -> dict[str, float]:
    sets, y = method.predict_set(task.test[0], SETS), task.test[1]
    held = sets[torch.arange(len(y), device=y.device), y]
    return {"coverage": float(held.double().mean()), "size": float(sets.double().sum(1).mean())}
