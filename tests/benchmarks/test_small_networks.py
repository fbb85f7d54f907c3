"""The case ``small_networks``: its problems, the arithmetic of its table, its verdict, and parts that are not there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

runner = importlib.import_module("benchmarks.run")
frame, small = (importlib.import_module(f"benchmarks.{name}") for name in ("frame", "small"))
case = runner.load_case("small_networks")


def logits(model: torch.nn.Module, x: Any) -> torch.Tensor:
    return model(**x) if isinstance(x, Mapping) else model(x)


@pytest.mark.parametrize("name", small.PROBLEMS)
def test_networks_answer_all_data_of_their_problem_and_strangers_are_other_inputs(name: str) -> None:
    options = SimpleNamespace(n=12, held_out=8, test=6, epochs=1)
    task = small.PROBLEMS[name](frame.Settings(torch.device("cpu"), None, 0, options=options))
    assert [len(y) for _, y in (task.train, task.held_out, task.test)] == [12, 8, 6]
    known = logits(task.model, task.test[0])
    for x in task.strangers.values():
        found = logits(task.model, x)
        assert found.shape == known.shape
        assert found.isfinite().all()
        assert not torch.equal(found, known)


def a_run(default: float, network: float) -> dict[str, Any]:
    aurocs = {"MSP": network, "KNN": 0.5, "GEN": 0.7, "default": default, "calibrated": 0.8}
    figures = {"nll": 1.0, "nll_change": 0.0, "accuracy": 0.9, "accuracy_change": 0.0, "alarms": 0.05}
    return {
        "network": "a", "posterior": "Projected", **figures,
        "aurocs": {name: {"x": value, "y": value - 0.1} for name, value in aurocs.items()},
    }  # fmt: skip


def test_summary_has_the_best_detector_and_the_worst_difference() -> None:
    row = case.summary([a_run(0.60, 0.61), a_run(0.70, 0.60)])
    assert (row["which"], row["best detector"]) == ("GEN", pytest.approx(0.65))
    assert (row["MSP"], row["default"]) == (pytest.approx(0.555), pytest.approx(0.6))
    assert (row["worst"], row["below"]) == (pytest.approx(-0.01), 0.5)


@pytest.mark.parametrize(
    ("pairs", "holds"),
    [
        ([(0.59, 0.60), (0.62, 0.60)], True),
        ([(0.59, 0.60), (0.60, 0.60)], False),  # the mean is lower
        ([(0.54, 0.60), (0.70, 0.60)], False),  # one difference is too large
    ],
)
def test_claim_is_about_means_and_the_worst_difference(pairs: list[tuple[float, float]], holds: bool) -> None:
    row = case.summary([a_run(default, network) for default, network in pairs])
    assert case._holds(case._judged([row])) == holds


def test_part_that_does_not_exist_is_named() -> None:
    found = runner.run_case(
        "small_networks", size="small", device=torch.device("cpu"), data=None, seed=0, overrides={"parts": "nothing"}
    )
    assert "breast_cancer" in found["skipped"]
