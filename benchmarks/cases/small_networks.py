"""On small networks the default score is nowhere far below the largest probability, and calibrated it beats detectors.

Tables, series, sets of points and tokens (``benchmarks/small.py``), each with several sets of strangers of kinds that
``calibrate`` does not make itself. Both posteriors are fitted with defaults. Figures are AUROCs between test
data and strangers, means over strangers and seeds:

- ``MSP``: the network's largest probability;
- ``default`` and ``calibrated``: the posterior's own score, before and after ``calibrate`` on held-out data;
- ``best detector``: the detector with the highest mean on that network. It is chosen by these strangers, which flatters
  it. Detectors that refuse a likelihood are left out: some need one class per input.

``worst`` is the smallest difference between ``default`` and ``MSP`` over strangers and seeds, and ``below`` the share
of differences under -0.005. ``nll`` and ``accuracy`` are the network's on test data, beside what the posterior changes;
the class that a posterior predicts is the network's by construction. ``alarms`` is the share of test data that is
flagged at level 0.05. The claim is that ``worst`` is at least -0.05, and that over the networks the mean of ``default``
is at least that of ``MSP``, and that of ``calibrated`` at least that of ``best detector``.

``parts`` are problems, joined by plus signs, and ``runs`` counts the seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, result
from benchmarks.problems import KINDS
from benchmarks.small import PROBLEMS
from nullbayes.experiments.tasks import Task

SMALL = {"parts": "breast_cancer+multilabel_table", "runs": 1, "n": 150, "held_out": 120, "test": 60, "epochs": 15}
FULL = {"parts": "+".join(PROBLEMS), "runs": 3, "n": 1000, "held_out": 500, "test": 400, "epochs": 40}
NETWORK, DETECTORS = "MSP", ("KNN", "Mahalanobis", "ViM", "Energy", "GEN")
FAR, CLOSE = 0.05, 0.005  # how far below the largest probability the claim allows, and what does not count as below
Row = dict[str, Any]


def run(settings: Settings) -> dict[str, Any]:
    """Measure one network after the other; the table has one row per network and posterior."""
    o, found, notes = settings.options, list[Row](), list[str]()
    wanted = o.parts.split("+")
    if odd := next((part for part in wanted if part not in PROBLEMS), None):
        msg = f"There is no part {odd!r}: there are {', '.join(PROBLEMS)}."
        raise Skipped(msg)
    for part in wanted:
        try:
            for seed in range(settings.seed, settings.seed + o.runs):
                own = replace(settings, seed=seed)
                found += measure(own, PROBLEMS[part](own))
        except Skipped as reason:
            notes.append(f"{part} is left out. {reason}")
    if not found:
        raise Skipped(" ".join(notes))
    keys = dict.fromkeys((run["network"], run["posterior"]) for run in found)
    rows = [summary([run for run in found if (run["network"], run["posterior"]) == key]) for key in keys]
    judged = _judged(rows)
    return {**result(rows, judged, holds=_holds(judged), notes=notes), "each": found}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(settings: Settings, task: Task) -> Iterator[Row]:
    """Yield what was found for each posterior, beside the detectors of the same network."""
    network = nb.evaluate(dict(_detectors(task)), [task.test], task.strangers)
    for kind, _ in KINDS.values():
        posterior = kind(task.model, task.likelihood)
        posterior.fit([task.train], generator=settings.generator(), progress=False)
        plain = nb.evaluate({"default": posterior}, [task.test], task.strangers)["default"]
        posterior.calibrate([task.held_out])
        calibrated = nb.evaluate({"calibrated": posterior}, [task.test], task.strangers)["calibrated"]
        yield {
            "network": task.name,
            "posterior": kind.__name__.removesuffix("Posterior"),
            "seed": settings.seed,
            "aurocs": {
                row.name: {name: figures.auroc for name, figures in row.strangers.items()}
                for row in (*network.rows, plain, calibrated)
            },
            "nll": network[NETWORK].nll,
            "nll_change": plain.nll - network[NETWORK].nll,
            "accuracy": network[NETWORK].accuracy,
            "accuracy_change": plain.accuracy - network[NETWORK].accuracy,
            "alarms": calibrated.false_alarms,
        }


def _detectors(task: Task) -> Iterator[tuple[str, Any]]:
    """Yield the detectors that take the likelihood of the network, fitted."""
    for name in (NETWORK, *DETECTORS):
        try:
            yield name, getattr(nb.detectors, name)(task.model, task.likelihood).fit([task.train])
        except nb.errors.LikelihoodError:
            continue


# --- tables -----------------------------------------------------------------------------------------------------------


def summary(runs: Sequence[Row]) -> Row:
    """Return one row for the runs of a network and a posterior."""
    means = {name: fmean(a for run in runs for a in run["aurocs"][name].values()) for name in runs[0]["aurocs"]}
    best = max((name for name in DETECTORS if name in means), key=lambda name: means[name])
    pairs = [(run["aurocs"]["default"], run["aurocs"][NETWORK]) for run in runs]
    gaps = [default[name] - network[name] for default, network in pairs for name in default]
    figures = ("nll", "nll_change", "accuracy", "accuracy_change", "alarms")
    return {
        "network": runs[0]["network"],
        "posterior": runs[0]["posterior"],
        **{name: means[name] for name in (NETWORK, "default", "calibrated")},
        "best detector": means[best],
        "which": best,
        "worst": min(gaps),
        "below": fmean(float(gap < -CLOSE) for gap in gaps),
        **{name: fmean(run[name] for run in runs) for name in figures},
    }


def _judged(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of the claim for each posterior: means over the networks, and the worst difference."""
    judged: dict[str, float] = {}
    for posterior in dict.fromkeys(row["posterior"] for row in rows):
        own = [row for row in rows if row["posterior"] == posterior]
        mean = {name: fmean(row[name] for row in own) for name in (NETWORK, "default", "calibrated", "best detector")}
        judged |= {
            f"{posterior}: default/{NETWORK}": mean["default"] / mean[NETWORK],
            f"{posterior}: calibrated/best detector": mean["calibrated"] / mean["best detector"],
            f"{posterior}: worst default - {NETWORK}": min(row["worst"] for row in own),
        }
    return judged


def _holds(judged: Mapping[str, float]) -> bool:
    return all(value >= (-FAR if "worst" in name else 1.0) for name, value in judged.items())
