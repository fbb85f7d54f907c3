"""A fit stays within its memory limit, and the plan says beforehand how much it will take.

Peak memory beyond model and data, against ``memory_limit`` and against ``nb.plan(...).peak_bytes``. On CUDA it is what
PyTorch allocated; on a CPU each fit runs in a process of its own, and what counts is the high-water mark of resident
memory over what a tiny fit before it had taken. A limit too small to work with is refused, which keeps the promise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import nullbayes as nb
from benchmarks.frame import Settings, in_fresh_process, result
from benchmarks.measure import Peak
from benchmarks.problems import KINDS, untrained
from nullbayes.experiments.networks import cnn

SMALL = {"n": 60, "width": 4, "samples": 2, "limits": (100,), "rows": "output", "tolerance": 0.1}
FULL = {
    "n": 600, "width": 32, "samples": 10, "limits": (4000, 1000, 500, 300, 200), "rows": "output", "tolerance": 0.05,
}  # fmt: skip
CUDA = {"n": 20_000, "width": 32, "samples": 30, "limits": (100_000, 40_000, 20_000, 10_000)}
_MIB = 2**20
SLACK = 1.2  # a limit is kept if no more than a fifth is taken beyond it: a process keeps some of what it has freed

FACTOR = 1.5  # that the prediction may be off by, either way


def run(settings: Settings) -> dict[str, Any]:
    """Fit under one limit after the other."""
    o = settings.options
    rows = []
    for limit in o.limits:
        spec = {**vars(o), "limit": limit * _MIB, "device": str(settings.device), "seed": settings.seed}
        fresh = settings.device.type == "cpu"
        found = in_fresh_process("benchmarks.cases.memory", "measure", spec) if fresh else measure(spec)
        row = {"limit_mib": limit, **found}
        if row["peak_mib"] is not None:
            row["peak/limit"] = row["peak_mib"] / limit
            row["peak/predicted"] = row["peak_mib"] / row["predicted_mib"]
        rows.append(row)
    measured = [row for row in rows if row["peak_mib"] is not None]
    ratios = {
        "peak/limit, worst": max((row["peak/limit"] for row in measured), default=None),
        "peak/predicted, worst": max((row["peak/predicted"] for row in measured), default=None),
    }
    worst = ratios["peak/limit, worst"]
    notes = [] if worst is not None else ["This system does not tell how much memory a process took."]
    near = all(1 / FACTOR <= row["peak/predicted"] <= FACTOR for row in measured)
    return result(rows, ratios, holds=None if worst is None else worst <= SLACK and near, notes=notes)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Fit once under a limit; return peak and prediction."""
    o = SimpleNamespace(**spec)
    settings = Settings(torch.device(o.device), seed=o.seed, options=o)
    problem = untrained(settings, lambda: cnn(o.width), (1, 8, 8), o.n)
    common = {"n_samples": o.samples, "memory_limit": o.limit, "tolerance": o.tolerance}
    try:
        plan = nb.plan(problem.model, problem.loader, loss=o.rows == "loss", **common)
    except nb.errors.SettingsError as error:
        return {"peak_mib": None, "predicted_mib": None, "projector": None, "storage": None, "refused": str(error)}
    posterior = KINDS[o.rows][0](problem.model, prior_precision=1.0)
    posterior.fit(problem.first(8).loader, n_samples=2, tolerance=0.5, progress=False).release()
    with Peak(settings.device) as peak:
        posterior.fit(problem.loader, progress=False, **common)
    return {
        "peak_mib": None if peak.bytes is None else peak.bytes / _MIB,
        "predicted_mib": plan.peak_bytes / _MIB,
        "projector": posterior.report.projector,
        "storage": plan.storage,
        "refused": None,
    }
