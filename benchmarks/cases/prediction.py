"""Predicting with S samples costs at most three plain forward passes a sample.

``predict`` against S forward passes of the network without gradients, on the same inputs; and the exact functional
variance, which has no Monte Carlo error, against the variance of the samples.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.frame import Settings, result
from benchmarks.measure import median_seconds
from benchmarks.problems import KINDS, trained_on_images

SMALL = {"n": 40, "inputs": 40, "exact_inputs": 4, "samples": 4, "epochs": 2, "repeats": 1, "tolerance": 0.05}
FULL = {"n": 300, "inputs": 1000, "exact_inputs": 20, "samples": 30, "epochs": 60, "repeats": 3, "tolerance": 1e-2}
CUDA = {"n": 2000, "inputs": 10_000, "exact_inputs": 100}
TIMES = 3.0  # what the claim promises


def run(settings: Settings) -> dict[str, Any]:
    """Time predictions of both kinds."""
    o, device = settings.options, settings.device
    problem = trained_on_images(settings, max(o.n, o.inputs), o.epochs)
    x, few = problem.x[: o.inputs], problem.x[-o.exact_inputs :]
    posterior = KINDS["output"][0](problem.model, prior_precision=1.0).fit(
        problem.first(o.n).loader, n_samples=o.samples, tolerance=o.tolerance, generator=settings.generator(),
        progress=False,
    )  # fmt: skip

    @torch.no_grad()
    def passes() -> None:
        for _ in range(o.samples):
            problem.model(x)

    plain = median_seconds(passes, device, o.repeats)
    rows = [{"what": f"{o.samples} forward passes", "inputs": len(x), "seconds": plain}]
    for pred_type in ("linearized", "sampled"):
        seconds = median_seconds(lambda how=pred_type: posterior.predict(x, pred_type=how), device, o.repeats)
        rows.append({"what": f"predict, {pred_type}", "inputs": len(x), "seconds": seconds})
    sampled = median_seconds(lambda: posterior.functional_variance(few), device, o.repeats)
    exact = median_seconds(lambda: posterior.functional_variance(few, exact=True), device, o.repeats)
    true, estimate = posterior.functional_variance(few, exact=True), posterior.functional_variance(few)
    error = float(((estimate - true).square().mean() / true.square().mean()).sqrt())
    rows += [
        {"what": "variance of the samples", "inputs": len(few), "seconds": sampled, "relative_error": error},
        {"what": "exact variance", "inputs": len(few), "seconds": exact, "relative_error": 0.0},
    ]
    ratios = {
        "predict/forward passes, linearized": rows[1]["seconds"] / plain,
        "predict/forward passes, sampled": rows[2]["seconds"] / plain,
        "exact/sampled variance": exact / sampled,
    }
    notes = [f"{problem.name}, {problem.n_parameters:,} parameters"]
    return result(rows, ratios, holds=ratios["predict/forward passes, linearized"] <= TIMES, notes=notes)
