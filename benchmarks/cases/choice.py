"""The automatic choice takes at most one and a half times as long as the best projector for the problem.

Four problems, among them few rows, few parameters, and many of both; every projector is asked for the same tolerance,
and the best is the fastest that reached it. A direct method whose matrix would be larger than ``direct`` is left out.
"""

from __future__ import annotations

import statistics
from typing import Any

import nullbayes as nb
from benchmarks.frame import Settings, result
from benchmarks.problems import KINDS, Problem, mlp, trained_on_digits
from nullbayes.experiments.measuring import Clock
from nullbayes.experiments.networks import cnn

SMALL = {
    "n": 12, "wide": 2, "narrow": 1, "samples": 2, "tolerance": 0.1, "epochs": 1, "direct": 500, "sweeps": 20,
    "repeats": 1,
}  # fmt: skip
FULL = {
    "n": 500, "wide": 16, "narrow": 16, "samples": 30, "tolerance": 1e-2, "epochs": 40, "direct": 3000, "sweeps": 200,
    "repeats": 3,
}  # fmt: skip
CUDA = {"n": 1797, "wide": 32, "direct": 20_000}
TIMES = 1.5  # what the claim promises
PATIENCE = 30.0  # seconds after which a fit is not repeated


def run(settings: Settings) -> dict[str, Any]:
    """Time the choice and its rivals on every problem."""
    o = settings.options
    wide = trained_on_digits(settings, "CNN", lambda: cnn(o.wide), o.n, o.epochs)
    narrow = trained_on_digits(settings, "small MLP", lambda: mlp(64, o.narrow), o.n, o.epochs)
    problems = [
        ("few output rows", "output", wide.first(max(8, o.n // 10))),
        ("many output rows", "output", wide),
        ("loss rows", "loss", wide),
        ("few parameters", "output", narrow),
    ]
    rows, ratios, notes = [], {}, []
    for name, kind, problem in problems:
        rows_per_example = 10 if kind == "output" else 1
        asked = {"auto": "auto", **_projectors(o, rows_per_example * len(problem.x), problem.n_parameters)}
        found = _compare(settings, kind, problem, asked)
        rows += [{"problem": name, "asked": method, **row} for method, row in found.items()]
        rivals = {m: r["seconds"] for m, r in found.items() if m != "auto" and r["reached"]}
        if not found["auto"]["reached"] or not rivals:
            ratios[name] = None
            notes.append(f"{name}: no ratio, since the choice or every rival missed the tolerance.")
            continue
        best = min(rivals, key=rivals.__getitem__)
        ratios[name] = found["auto"]["seconds"] / rivals[best]
        notes.append(f"{name}: {best} was the fastest.")
    known = [ratio for ratio in ratios.values() if ratio is not None]
    return result(rows, ratios, holds=len(known) == len(ratios) and max(known) <= TIMES, notes=notes)


def _projectors(o: Any, n_rows: int, n_parameters: int) -> dict[str, nb.projectors.Projector]:
    p, rtol = nb.projectors, o.tolerance
    every: dict[str, nb.projectors.Projector] = {
        "Alternating": p.Alternating(rtol=rtol, max_sweeps=o.sweeps),
        "Krylov": p.Krylov(rtol=rtol, max_sweeps=o.sweeps),
        "Lanczos": p.Lanczos(rtol=rtol, rank=max(1, min(300, n_rows // 2))),
    }
    if n_rows <= o.direct:
        every["ExactDual"] = p.ExactDual(truncate=True, rtol=rtol)
    if n_parameters <= o.direct:
        every["ExactPrimal"] = p.ExactPrimal(truncate=True, rtol=rtol)
    return every


def _compare(settings: Settings, kind: str, problem: Problem, asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fit with each in turn, round after round, so that what a machine does beside it falls on all alike."""
    _fit(settings, kind, problem.first(8), "auto")
    rounds: dict[str, list[dict[str, Any]]] = {method: [] for method in asked}
    for _ in range(settings.options.repeats):
        for method, projector in asked.items():
            if sum(row["seconds"] for row in rounds[method]) < PATIENCE:
                rounds[method].append(_fit(settings, kind, problem, projector))
    return {
        method: rows[-1] | {"seconds": statistics.median(row["seconds"] for row in rows)}
        for method, rows in rounds.items()
    }


def _fit(settings: Settings, kind: str, problem: Problem, projector: Any) -> dict[str, Any]:
    o = settings.options
    posterior = KINDS[kind][0](problem.model, prior_precision=1.0)
    with Clock(settings.device) as clock:
        posterior.fit(
            problem.loader, n_samples=o.samples, projector=projector, tolerance=o.tolerance,
            generator=settings.generator(), progress=False,
        )  # fmt: skip
    report = posterior.report
    return {
        "took": report.projector,
        "seconds": clock.seconds,
        "sweeps": report.sweeps,
        "residual": max(report.residual),
        "reached": report.converged,
    }
