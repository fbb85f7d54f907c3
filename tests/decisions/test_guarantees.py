"""Over many draws of held-out data, false alarms and misses are as frequent as promised: no more, and hardly fewer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from support.models import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION, Task
from support.trained import draw, trained

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
SPLITS, NEW = 14, 200
LEVELS = (0.01, 0.05, 0.1)
Rates = dict[tuple[str, float], list[float]]


def fitted(task: Task, kind: Callable[..., Any] = nb.ProjectedPosterior) -> Any:
    """A posterior of a network that has learned from 1,000 examples, for 60 of them."""
    return kind(trained(task), task.likelihood, prior_precision=10.0).fit(
        *draw(task), 4, generator=torch.Generator().manual_seed(0), progress=False
    )


def over_splits(posterior: Any, task: Task, n: int, ask: Callable[..., dict[str, Any]], **how: Any) -> Rates:
    """The rates that ``ask`` returns for new data, over many draws of held-out and new data."""
    rates: Rates = {}
    for seed in range(1, SPLITS + 1):
        x, y = draw(task, n + NEW, seed)
        posterior.calibrate(x[:n], y[:n], **how)
        for level in LEVELS:
            for name, wrong in ask(x[n:], y[n:], level).items():
                rates.setdefault((name, level), []).append(float(wrong.double().mean()))
    return rates


def assert_promised(rates: Rates, m: int, *, all_examples: int | None = None, two_sided: bool = True) -> None:
    """The mean over the splits is that of ranks, within four standard errors of ranks and of new data.

    Alarms are ranks among ``m`` examples, and errors ranks among ``all_examples``, if they are more.
    """
    ranked = m
    for (name, level), values in rates.items():
        m = ranked if name == "alarm" or all_examples is None else all_examples
        exact = math.floor(level * (m + 1) + 1e-9) / (m + 1)
        error = math.sqrt(level * (1 - level) * (1 / (m + 2) + 1 / NEW) / len(values))
        mean = sum(values) / len(values)
        assert mean <= level + 4 * error, (name, level, mean)
        if two_sided:
            assert mean >= exact - 4 * error, (name, level, mean)


def test_false_alarms_and_label_sets_of_a_classifier() -> None:
    posterior = fitted(CLASSIFICATION)

    def ask(x: Tensor, y: Tensor, level: float) -> dict[str, Any]:
        lacks = ~posterior.predict_set(x, level).gather(1, y[:, None])[:, 0]
        return {"alarm": posterior.is_ood(x, level), "lacks": lacks}

    assert_promised(over_splits(posterior, CLASSIFICATION, 398, ask), m=199, all_examples=398)
    assert posterior.calibration.kind == "combined"


@pytest.mark.slow
def test_false_alarms_and_intervals_of_a_regression() -> None:
    posterior = fitted(REGRESSION)

    def ask(x: Tensor, y: Tensor, level: float) -> dict[str, Any]:
        lower, upper = posterior.predict_interval(x, level)
        outside = (y < lower) | (y > upper)
        return {"alarm": posterior.is_ood(x, level), "first": outside[:, 0], "second": outside[:, 1]}

    assert_promised(over_splits(posterior, REGRESSION, 398, ask), m=199, all_examples=398)


@pytest.mark.slow
@pytest.mark.parametrize("task", [BINARY, MULTILABEL], ids=lambda task: task.name)
def test_false_alarms_and_label_sets_by_a_score_that_is_named(task: Task) -> None:
    """All held-out examples are ranked then. Examples without labels make sets of several labels larger."""
    posterior = fitted(task)

    def ask(x: Tensor, y: Tensor, level: float) -> dict[str, Any]:
        found = posterior.predict_set(x, level)
        lacks = ~found.gather(1, y[:, None])[:, 0] if task is BINARY else ((y == 1) & ~found).any(1)
        return {"alarm": posterior.is_ood(x, level), "lacks": lacks}

    rates = over_splits(posterior, task, 199, ask, kind="max_variance")
    alarms = {key: values for key, values in rates.items() if key[0] == "alarm"}
    assert_promised(alarms, m=199)
    assert_promised(rates, m=199, two_sided=task is BINARY)


def test_strangers_are_flagged_more_often_than_promised() -> None:
    """The guarantee alone would hold for a coin; the score has to tell strangers, too."""
    posterior = fitted(CLASSIFICATION).calibrate(*draw(CLASSIFICATION, 1000, 1))
    x = draw(CLASSIFICATION, 300, 2)[0]
    assert posterior.is_ood(x, 0.05).double().mean() < 0.12
    assert posterior.is_ood(6.0 * x, 0.05).double().mean() > 0.5
