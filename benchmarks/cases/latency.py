"""One input takes at most three plain forward passes and two milliseconds, with 30 samples.

``predict`` and ``ood_score`` for one input at a time against forward passes of the network on the same input, without
gradients. Both sides are called in turns, in one thread; the times are medians, and of predictions the 99th percentile,
too. The networks are as they begin: no time here depends on what they have learned. Fits are not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frame import Settings, Skipped, result
from benchmarks.measure import one_thread
from benchmarks.problems import KINDS, bert, color_cnn, distilbert, resnet18
from nullbayes.experiments.measuring import Clock, seeded
from nullbayes.experiments.networks import batchnorm_cnn, lenet, resnet20

NETWORKS = ("lenet", "batchnorm_cnn", "cnn", "resnet20", "distilbert", "bert", "resnet18")
SMALL = {
    "networks": NETWORKS, "n": 4, "samples": 4, "hidden": 8, "image": 32, "repeats": 2, "tolerance": 0.05,
}  # fmt: skip
FULL = {
    "networks": NETWORKS, "n": 40, "samples": 30, "hidden": 64, "image": 64, "repeats": 200, "tolerance": 1e-2,
}  # fmt: skip
PASSES, SECONDS = 3.0, 2e-3  # what the claim promises
_WORDS, _FEW_WORDS, _TOKENS = 1000, 70, 20


def run(settings: Settings) -> dict[str, Any]:
    """Time predictions for one input at a time."""
    rows: list[dict[str, Any]] = []
    notes = [
        "one thread; medians of calls in turns; bound = 3 forward passes + 2 ms",
        "torch: the same prediction by torch alone, the faster of two ways: rows by backward passes, mapped over the "
        "outputs or one after the other, and a product of the rows with the samples",
    ]
    with one_thread():
        for name in settings.options.networks:
            try:
                rows.append(_measure(settings, name))
            except Skipped as reason:
                notes.append(f"{name} is left out. {reason}")
    ratios = {
        f"predict/{side}, {row['network']}": row["predict_ms"] / row[f"{side}_ms"]
        for side in ("bound", "torch")
        for row in rows
    }
    return result(rows, ratios, holds=all(row["holds"] for row in rows) if rows else None, notes=notes)


def _measure(settings: Settings, name: str) -> dict[str, Any]:
    """Return the times of one network."""
    o, device = settings.options, settings.device
    build, x, classes, parameters = _problem(settings, name)
    y = torch.randint(classes, (o.n,), generator=settings.generator()).to(device)
    with seeded(settings.seed):
        model = build().to(device).eval()
    posterior = KINDS["output"][0](model, prior_precision=1.0, parameters=parameters).fit(
        [(x, y)], n_samples=o.samples, tolerance=o.tolerance, generator=settings.generator(), progress=False
    )

    @torch.no_grad()
    def plain(one: Tensor) -> None:
        model(one)

    calls: dict[str, Callable[[Tensor], Any]] = {
        "forward": plain, "predict": posterior.predict, "score": lambda one: posterior.ood_score(one, "max_variance"),
    }  # fmt: skip
    named = [(name, p) for name, p in model.named_parameters() if parameters is None or fnmatchcase(name, parameters)]
    free, samples = [p for _, p in named], posterior.directions
    calls |= {way: partial(_by_torch, model, free, samples, mapped=way == "mapped") for way in ("mapped", "one by one")}
    times: dict[str, list[float]] = {what: [] for what in calls}
    for i in range(-2, o.repeats):  # what is found out once is no part of it
        one = x[i % len(x)][None]
        for what, call in calls.items():
            with Clock(device) as clock:
                call(one)
            times[what] += [clock.seconds] * (i >= 0)
    forward, predict, score, *torch_alone = (statistics.median(seconds) for seconds in times.values())
    rare = sorted(times["predict"])[int(0.99 * o.repeats)]
    bound = PASSES * forward + SECONDS
    return {
        "network": name,
        "parameters": posterior.directions.shape[1],
        "outputs": classes,
        "forward_ms": 1e3 * forward,
        "predict_ms": 1e3 * predict,
        "p99_ms": 1e3 * rare,
        "ood_score_ms": 1e3 * score,
        "bound_ms": 1e3 * bound,
        "torch_ms": 1e3 * min(torch_alone),
        "holds": max(predict, score) <= bound,
    }


def _by_torch(
    model: nn.Module, free: list[nn.Parameter], samples: Tensor, one: Tensor, *, mapped: bool
) -> Tensor:  # (S, P), (1, ...) -> (O, S)
    """Return what the samples change of the outputs of one input, as one would write it without the library."""
    returned = model(one)
    values = (returned if isinstance(returned, Tensor) else returned.logits)[0]
    if mapped:
        each = torch.eye(len(values), dtype=values.dtype, device=values.device)
        parts = torch.autograd.grad(values, free, each, is_grads_batched=True)
    else:
        found = (torch.autograd.grad(value, free, retain_graph=True) for value in values)
        parts = tuple(map(torch.stack, zip(*found, strict=True)))
    return torch.cat([part.flatten(1) for part in parts], dim=1) @ samples.T


def _problem(settings: Settings, name: str) -> tuple[Callable[[], nn.Module], Tensor, int, str | None]:
    """Return how to build a network, inputs for it, the number of outputs, and which parameters vary."""
    o = settings.options
    if name == "bert":
        tokens = torch.randint(_WORDS, (o.n, _TOKENS), generator=settings.generator()).to(settings.device)
        return lambda: bert(o.hidden, words=_WORDS, tokens=_TOKENS, outputs=3), tokens, 3, None
    if name == "distilbert":
        tokens = torch.randint(_FEW_WORDS, (o.n, _TOKENS), generator=settings.generator()).to(settings.device)
        return lambda: distilbert(words=_FEW_WORDS, outputs=3), tokens, 3, None
    if name == "cnn":
        return color_cnn, settings.normal(o.n, 3, 32, 32), 10, None
    if name == "resnet20":
        return lambda: resnet20(None)[0], settings.normal(o.n, 3, 32, 32), 10, None
    if name == "resnet18":
        return resnet18, settings.normal(o.n, 3, o.image, o.image), 10, "fc.*"
    build, size = {"lenet": (lenet, 28), "batchnorm_cnn": (batchnorm_cnn, 8)}[name]
    return build, settings.normal(o.n, 1, size, size), 10, None
