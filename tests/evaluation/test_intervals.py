"""The intervals of `nb.evaluate` are those of a bootstrap over examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.evaluation import EvaluationRow
from support.evaluated import STRANGERS, N, X, Y, drawn, labels


def widths(row: EvaluationRow) -> dict[str, float]:
    found = {f"{s}: {name}": ends for s, d in row.strangers.items() for name, ends in d.intervals.items()}
    return {name: high - low for name, (low, high) in {**found, **row.intervals}.items()}


def test_intervals_contain_their_figures_and_shrink_with_more_data(projected: Any) -> None:
    inside, strangers = drawn(7, 1600), {"far": drawn(8, 1600, 1.5)}
    y = labels(1600)
    asked = {"bootstrap": 100, "generator": torch.Generator().manual_seed(0)}
    large = nb.evaluate([projected], (inside, y), strangers, **asked).rows[0]
    small = nb.evaluate([projected], (inside[:100], y[:100]), {"far": strangers["far"][:100]}, **asked).rows[0]
    for row in (large, small):
        assert set(row.intervals) == {"nll", "accuracy", "aurc"}
        for name, (low, high) in row.intervals.items():
            assert low < getattr(row, name) < high
        for name, (low, high) in row.strangers["far"].intervals.items():
            assert low < getattr(row.strangers["far"], name) < high
    assert set(large.strangers["far"].intervals) == {"auroc", "aupr", "fpr95"}
    for name, wide in widths(small).items():
        assert widths(large)[name] < 0.5 * wide, name  # about a quarter


@pytest.mark.slow
def test_intervals_of_an_accuracy_are_those_of_a_binomial(network: Any) -> None:
    row = nb.evaluate([network], (X, Y), STRANGERS, bootstrap=2000, generator=torch.Generator().manual_seed(0)).rows[0]
    low, high = row.intervals["accuracy"]
    wanted = 2 * 1.645 * (row.accuracy * (1 - row.accuracy) / N) ** 0.5
    assert high - low == pytest.approx(wanted, rel=0.15)  # steps of 1/60


def test_the_same_seed_gives_the_same_intervals(projected: Any, network: Any) -> None:
    def asked(seed: int) -> list[Any]:
        methods, generator = {"a": projected, "b": network}, torch.Generator().manual_seed(seed)
        found = nb.evaluate(methods, (X, Y), STRANGERS, scores="max_logit", bootstrap=20, generator=generator)
        return [(row.intervals, row.strangers["far"].intervals) for row in found.rows]

    assert asked(0) == asked(0)
    assert asked(0) != asked(1)
    (first, _), (second, _) = asked(0)
    assert first["aurc"] == pytest.approx(second["aurc"])  # the same score and classes, on the same resamples


def test_without_resamples_nothing_is_drawn(projected: Any) -> None:
    before = torch.get_rng_state()
    row = nb.evaluate([projected], (X, Y), STRANGERS).rows[0]
    assert torch.equal(before, torch.get_rng_state())
    assert row.intervals == {}
