"""A sweep is linear in examples and parameters, and 30 samples cost at most two times one, or what bare products cost.

Where products wait for memory, as on a GPU, more samples are nearly free; where they wait for arithmetic, as on two
cores, no method can have 30 times as much of it in twice the time. Bare products are those of a dense matrix with as
many rows and columns, there and back, with 30 vectors beside one.

One alternating sweep with its residual measured, over rows that are held, over rows formed again in each sweep, and by
the published algorithm (a JVP and a VJP a sample, no residual). Random images and weights: the cost of a sweep does not
depend on them. Exponents are slopes of log seconds over log size; on CUDA, of log peak memory (factors included) too.
"""

from __future__ import annotations

from typing import Any

import torch

import nullbayes as nb
from benchmarks import published
from benchmarks.frame import Settings, result
from benchmarks.measure import Peak, cuda_mib, exponent, median_seconds
from benchmarks.problems import Problem, untrained
from nullbayes.experiments.networks import cnn

SMALL = {
    "n": (16, 32), "width": (2, 4), "samples": (1, 3), "base_n": 16, "base_width": 2, "base_samples": 2,
    "block_rows": 80, "sweeps": 1, "repeats": 1,
}  # fmt: skip
FULL = {
    "n": (125, 250, 500, 1000), "width": (4, 8, 16, 32), "samples": (1, 3, 10, 30), "base_n": 250, "base_width": 8,
    "base_samples": 10, "block_rows": 500, "sweeps": 2, "repeats": 3,
}  # fmt: skip
CUDA = {
    "n": (2000, 4000, 8000, 16_000), "width": (8, 16, 32, 64), "base_n": 4000, "base_width": 16, "block_rows": 4000,
}  # fmt: skip
METHODS = ("held", "formed", "published")


def run(settings: Settings) -> dict[str, Any]:
    """Time a sweep along three axes."""
    o = settings.options
    rows: list[dict[str, Any]] = []
    for axis in ("n", "width", "samples"):
        for value in getattr(o, axis):
            at = {"n": o.base_n, "width": o.base_width, "samples": o.base_samples, axis: value}
            problem = untrained(settings, lambda width=at["width"]: cnn(width), (1, 8, 8), at["n"])
            row = {"axis": axis, "N": at["n"], "P": problem.n_parameters, "S": at["samples"]}
            for method in METHODS:
                with Peak(settings.device) as peak:
                    row[method] = _sweep(settings, problem, method, at["samples"])
                row[f"{method} MiB"] = cuda_mib(peak)
            rows.append(row)
    exponents, ratios = {}, {}
    for axis, column in (("n", "N"), ("width", "P"), ("samples", "S")):
        along = [row for row in rows if row["axis"] == axis]
        for figure in (*METHODS, *(f"{method} MiB" for method in METHODS)):
            if all(row[figure] is not None for row in along):
                exponents[f"{figure} in {column}"] = exponent([r[column] for r in along], [r[figure] for r in along])
        ratios[f"published/held, most {column}"] = along[-1]["published"] / along[-1]["held"]
    for method in METHODS:
        along = [row for row in rows if row["axis"] == "samples"]
        ratios[f"{method}, most samples/fewest"] = along[-1][method] / along[0][method]
    ratios["bare products, most samples/fewest"] = bare = _bare(settings, along[0]["N"] * 10, along[0]["P"])
    holds = (
        exponents["held in N"] <= 1.1
        and exponents["held in P"] <= 1.1
        and ratios["held, most samples/fewest"] <= max(2.0, bare)
    )
    return {**result(rows, ratios, holds=holds), "exponents": exponents}


def _bare(settings: Settings, n_rows: int, n_columns: int) -> float:
    """Return how many times longer a dense matrix takes with the most samples than with the fewest, there and back."""
    matrix, seconds = settings.normal(n_rows, n_columns), []
    for samples in (settings.options.samples[0], settings.options.samples[-1]):
        vectors, back = settings.normal(samples, n_columns), settings.normal(samples, n_rows)

        def products(vectors: torch.Tensor = vectors, back: torch.Tensor = back) -> None:
            vectors @ matrix.T
            back @ matrix

        seconds.append(median_seconds(products, settings.device, 3 * settings.options.repeats))
    return seconds[1] / seconds[0]


def _sweep(settings: Settings, problem: Problem, method: str, samples: int) -> float:
    """Return the median seconds of a sweep."""
    o = settings.options
    noise = settings.normal(samples, problem.n_parameters)
    if method == "published":
        sweeps = published.PublishedSweeps(nb.OutputJacobian, problem.model, problem.x, problem.y)
        sweeps.record(noise)
        return median_seconds(lambda: sweeps.sweep(noise), settings.device, o.repeats)
    rows: nb.Rows = nb.OutputJacobian(problem.model, problem.loader)
    rows = rows.keep() if method == "held" else rows
    projector = nb.projectors.Alternating(block_rows=o.block_rows, rtol=1e-12, max_sweeps=o.sweeps)
    state = projector.prepare(rows)
    taken: list[int] = []

    def sweep() -> torch.Tensor:
        projection = projector.apply(state, noise)
        taken.append(projection.info.sweeps)
        return projection.directions

    return median_seconds(sweep, settings.device, o.repeats) / taken[-1]
