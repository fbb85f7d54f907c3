"""A sweep that forms its rows again costs the same for 5 samples and for 30, and beats a JVP and a VJP for each of 30.

ResNet-20 on CIFAR-10 (output rows) and a Swin transformer of the size of Swin-T (28 million parameters, 224 by 224
pixels, loss rows): images a second of one sweep, on the published side over the first of them only. Both sides take the
same block steps; rows are formed once a block for all samples, or never, with 16 examples a block as published. For
ResNet-20 a fit under a memory limit that its rows exceed follows. The full size needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

import nullbayes as nb
from benchmarks import published
from benchmarks.frame import Settings, Skipped, result
from benchmarks.measure import Peak, cuda_mib, median_seconds
from benchmarks.problems import KINDS, Problem, swin, untrained
from nullbayes.experiments.datasets import read_color
from nullbayes.experiments.measuring import Clock, seeded
from nullbayes.experiments.networks import ResNet, resnet20

SMALL = {
    "parts": ("resnet", "swin"), "samples": (2, 3), "repeats": 1, "resnet_tiny": True, "resnet_n": 16,
    "resnet_block": 4, "fit_n": 40, "fit_limit": 2, "fit_tolerance": 0.3, "image": 16, "embed": 8, "depths": (1, 1),
    "heads": (1, 2), "window": 2, "swin_n": 8, "swin_block": 4, "published_n": 8,
}  # fmt: skip
FULL = {
    "parts": ("resnet", "swin"), "samples": (5, 30), "repeats": 3, "resnet_tiny": False, "resnet_n": 2000,
    "resnet_block": 200, "fit_n": 2000, "fit_limit": 10_000, "fit_tolerance": 0.05, "image": 224, "embed": 96,
    "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "window": 7, "swin_n": 2048, "swin_block": 128,
    "published_n": 32,
}  # fmt: skip
GROWTH = 1.25  # what counts as the same
_MIB = 2**20


def run(settings: Settings) -> dict[str, Any]:
    """Measure both networks, where they can be had."""
    o = settings.options
    if settings.device.type != "cuda" and not o.resnet_tiny:
        msg = "The full size of streaming needs a GPU: --device cuda, or --size small."
        raise Skipped(msg)
    rows, ratios, notes = [], {}, []
    if "resnet" in o.parts:
        problem, note = _resnet(settings)
        notes.append(note)
        found = _sweeps(settings, "ResNet", "output", problem.first(o.resnet_n), o.resnet_block)
        rows += found
        ratios |= _ratios(found)
        rows.append(_fit(settings, problem.first(o.fit_n)))
    if "swin" in o.parts:
        try:
            problem = untrained(
                settings, lambda: swin(o.image, o.embed, o.depths, o.heads, o.window), (3, o.image, o.image), o.swin_n
            )
        except Skipped as reason:
            notes.append(str(reason))
        else:
            found = _sweeps(settings, "Swin", "loss", problem, o.swin_block)
            rows += found
            ratios |= _ratios(found)
    speed = [ratio for name, ratio in ratios.items() if name.endswith(f"published, S = {max(o.samples)}")]
    growth = [ratio for name, ratio in ratios.items() if "time formed" in name]
    holds = min(speed) > 1 and max(growth) <= GROWTH if speed else None
    return result(rows, ratios, holds=holds, notes=notes)


def _resnet(settings: Settings) -> tuple[Problem, str]:
    o = settings.options
    needed = max(o.resnet_n, o.fit_n)
    if o.resnet_tiny:
        return untrained(settings, lambda: ResNet(1, 2), (3, 8, 8), needed), "a tiny ResNet with random weights"
    with seeded(settings.seed):
        model, given = resnet20(settings.data)
    images = read_color(settings.data, "cifar10", "train")
    if images is None:
        return untrained(settings, lambda: model, (3, 32, 32), needed), "ResNet-20 on random images"
    x, y = images[0][:: max(1, len(images[0]) // needed)], images[1][:: max(1, len(images[1]) // needed)]
    x, y = x[:needed].to(settings.device), y[:needed].to(settings.device)
    weights = "given" if given else "random"
    return Problem("ResNet-20", model.to(settings.device), x, y), f"ResNet-20 on CIFAR-10, {weights} weights"


def _sweeps(settings: Settings, name: str, kind: str, problem: Problem, block: int) -> list[dict[str, Any]]:
    """Return images a second, formed and published, for each number of samples."""
    o, jacobian, found = settings.options, KINDS[kind][1], []
    handed_out = [(x.cpu(), y.cpu()) for x, y in problem.loader]  # as a DataLoader does
    rows, few = jacobian(problem.model, handed_out), problem.first(o.published_n)
    if settings.device.type == "cuda":  # as a fit does that forms rows in every sweep
        rows.working_bytes = int(0.7 * torch.cuda.mem_get_info(settings.device)[0])
    by_products = published.PublishedSweeps(jacobian, few.model, few.x, few.y)
    by_rows = published.BlockSweeps(rows, block * rows.rows_per_example)
    for samples in o.samples:
        noise = settings.normal(samples, rows.n_columns)
        by_products.record(noise)
        for method, sweeps, n in (("formed", by_rows, len(problem.x)), ("published", by_products, len(few.x))):
            with Peak(settings.device) as peak:
                seconds = median_seconds(lambda s=sweeps, v=noise: s.sweep(v), settings.device, o.repeats)
            speed = {"seconds": seconds, "images_per_second": n / seconds, "peak_mib": cuda_mib(peak)}
            found.append({"network": name, "P": rows.n_columns, "N": n, "S": samples, "method": method, **speed})
    return found


def _ratios(found: list[dict[str, Any]]) -> dict[str, float]:
    formed, other = found[::2], found[1::2]
    name, first, last = formed[0]["network"], formed[0], formed[-1]
    speed = {
        f"{name}: images/s, formed/published, S = {a['S']}": a["images_per_second"] / b["images_per_second"]
        for a, b in zip(formed, other, strict=True)
    }
    return speed | {
        f"{name}: time formed, S = {last['S']}/{first['S']}": last["seconds"] / first["seconds"],
        f"{name}: time published, S = {last['S']}/{first['S']}": other[-1]["seconds"] / other[0]["seconds"],
    }


def _fit(settings: Settings, problem: Problem) -> dict[str, Any]:
    """Fit with defaults under a limit."""
    o = settings.options
    common = {"n_samples": max(o.samples), "memory_limit": o.fit_limit * _MIB, "tolerance": o.fit_tolerance}
    try:
        plan = nb.plan(problem.model, problem.loader, **common)
    except nb.errors.SettingsError as error:
        return {"network": "ResNet", "N": len(problem.x), "method": f"fit, refused: {error}"}
    with Clock(settings.device) as clock, Peak(settings.device) as peak:
        posterior = nb.ProjectedPosterior(problem.model, prior_precision=1.0).fit(
            problem.loader, generator=settings.generator(), progress=False, **common
        )
    report = posterior.report
    return {
        "network": "ResNet", "P": report.n_parameters, "N": report.n_data, "S": report.n_samples,
        "method": f"fit, {report.projector}, rows {plan.storage}", "seconds": clock.seconds,
        "peak_mib": cuda_mib(peak), "sweeps": report.sweeps,
        "residual": max(report.residual), "reached": report.converged,
    }  # fmt: skip
