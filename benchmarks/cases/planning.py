"""A plan's seconds are within a factor of 1.3 of what the fit then takes, on a CPU.

A convolutional network on digits and, where there are data, LeNet on Fashion-MNIST, with default settings. The time
of a fit is that of the process divided by the number of threads, which does not depend on what else the machine does;
the elapsed time is beside it. Planning itself is timed as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import nullbayes as nb
from benchmarks.frame import Settings, result
from benchmarks.problems import Problem, trained_on_digits, trained_on_images
from nullbayes.experiments.datasets import there
from nullbayes.experiments.measuring import Clock
from nullbayes.experiments.networks import cnn

SMALL = {"n_digits": 40, "n_images": 0, "width": 4, "epochs": 1, "samples": 3}
FULL = {"n_digits": 962, "n_images": 2000, "width": 16, "epochs": 60, "samples": 30}
FACTOR = 1.3  # what the claim promises


def run(settings: Settings) -> dict[str, Any]:
    """Compare planned and measured seconds."""
    rows = []
    for problem in _problems(settings):
        for part in (problem.first(16), problem):  # the first fit of a process loads what torch loads late
            with Clock(settings.device) as planning:
                plan = nb.plan(part.model, part.loader, settings.options.samples)
            before = time.process_time()
            with Clock(settings.device) as clock:
                posterior = nb.ProjectedPosterior(part.model).fit(
                    part.loader, n_samples=settings.options.samples, generator=settings.generator(), progress=False
                )
            seconds = (time.process_time() - before) / torch.get_num_threads()
        rows.append(
            {
                "problem": problem.name,
                "projector": posterior.report.projector,
                "planned": plan.seconds,
                "seconds": seconds,
                "elapsed": clock.seconds,
                "planning": planning.seconds,
            }
        )
    ratios = {f"fit/plan, {row['problem']}": row["seconds"] / row["planned"] for row in rows}
    holds = all(1.0 / FACTOR <= ratio <= FACTOR for ratio in ratios.values())
    notes = [f"{torch.get_num_threads()} threads; seconds: of the process, per thread"]
    return result(rows, ratios, holds=holds if settings.device.type == "cpu" else None, notes=notes)


def _problems(settings: Settings) -> Iterator[Problem]:
    o = settings.options
    yield trained_on_digits(settings, "digits", lambda: cnn(o.width), o.n_digits, o.epochs)
    if o.n_images and there(settings.data, "fashion-mnist"):
        yield trained_on_images(settings, o.n_images, o.epochs)
