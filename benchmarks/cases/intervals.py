"""Intervals of a calibrated regression cover targets as often as they say, and are at most 2 % wider than plain ones.

Networks of one hidden layer on the usual splits of small regressions. A fifth of the training data is held out and
calibrates ``predict_interval``. Its width follows the predictive standard deviation of the posterior; plain split
conformal prediction on the network, which is ``MAP`` here, has one width for all inputs. Both hold on average; coverage
is also shown for the tenth of the test inputs on which the posterior is least certain, where one width is too narrow.
Without the data sets a sine curve stands in, with noise that grows to one side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, result
from nullbayes.experiments.datasets import read_uci
from nullbayes.experiments.measuring import seeded
from nullbayes.experiments.networks import train

SMALL = {"splits": 1, "epochs": 20, "samples": 10, "alpha": 0.1}
FULL = {"splits": 5, "epochs": 400, "samples": 30, "alpha": 0.1}
METHODS = {
    "ProjectedPosterior": nb.ProjectedPosterior,
    "LossProjectedPosterior": nb.LossProjectedPosterior,
    "LinearizedLaplace": nb.baselines.LinearizedLaplace,
    "MAP": nb.baselines.MAP,
}
ERRORS = 3.0  # standard errors that the claim allows
WIDER = 1.02
Row = dict[str, Any]


def run(settings: Settings) -> dict[str, Any]:
    """Measure every method on every split of every data set, and take means."""
    each = [row for name, data in _problems(settings) for row in measure(settings, name, data)]
    rows = []
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in each):
        own = [row for row in each if (row["data"], row["method"]) == (name, method)]
        means = {k: sum(row[k] for row in own) / len(own) for k in ("coverage", "width", "coverage where uncertain")}
        rows.append({"data": name, "method": method, "n_test": sum(row["n_test"] for row in own), **means})
    ours = [row for row in rows if row["method"] == "ProjectedPosterior"]
    plain = {row["data"]: row for row in rows if row["method"] == "MAP"}
    wanted = 1.0 - settings.options.alpha
    # of the test examples of a split, and of the held-out ones that the limit comes from
    error = {row["data"]: math.sqrt(2.0 * wanted * (1.0 - wanted) / row["n_test"]) for row in rows}
    ratios = {f"{row['data']}: width, projected/plain": row["width"] / plain[row["data"]]["width"] for row in ours}
    covers = all(abs(row["coverage"] - wanted) <= ERRORS * error[row["data"]] for row in ours)
    return result(rows, ratios, holds=covers and max(ratios.values()) <= WIDER)


def measure(settings: Settings, name: str, data: tuple[Tensor, ...]) -> Iterator[Row]:
    """Yield the coverage and the width of each method's intervals on one split."""
    o, (x, y, x_held, y_held, x_test, y_test) = settings.options, data
    with seeded(settings.seed):
        model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)).to(x)
        train(model, x, y, o.epochs, batch_size=32, loss=mse_loss)
    doubt = None
    for method, kind in METHODS.items():
        posterior: Any = kind(model, "regression")
        posterior.fit(x, y, o.samples, generator=settings.generator(), progress=False)
        posterior.calibrate(x_held, y_held)
        lower, upper = posterior.predict_interval(x_test, o.alpha)
        inside = ((lower <= y_test) & (y_test <= upper)).double()[:, 0]
        if doubt is None:
            doubt = posterior.predict(x_test).variance[:, 0].argsort(descending=True)[: max(1, len(x_test) // 10)]
        yield {
            "data": name, "method": method, "n_test": len(x_test), "coverage": float(inside.mean()),
            "width": float((upper - lower).mean()), "coverage where uncertain": float(inside[doubt].mean()),
        }  # fmt: skip


def _problems(settings: Settings) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    try:
        for name in ("concrete", "energy", "yacht"):
            for split in range(settings.options.splits):
                x, y, x_test, y_test = (part.to(settings.device) for part in read_uci(settings.data, name, split))
                order = torch.randperm(len(x), generator=settings.generator()).to(x.device)
                held, rest = order[: len(x) // 5], order[len(x) // 5 :]
                yield name, (x[rest], y[rest], x[held], y[held], x_test, y_test)
    except Skipped:
        for split in range(settings.options.splits):
            generator = torch.Generator().manual_seed(settings.seed + split)
            x = 2.0 * torch.rand(1000, 1, generator=generator) - 1.0
            y = torch.sin(4.0 * x) + 0.3 * x.abs() * torch.randn(1000, 1, generator=generator)
            parts = (x[:300], y[:300], x[300:400], y[300:400], x[400:], y[400:])
            yield "sine", tuple(part.to(settings.device) for part in parts)
