"""Verdicts on the paper's claims follow the figures of a study, and no predictions can have the figures of Table 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.experiments import paper
from nullbayes.experiments.findings import findings
from nullbayes.experiments.gathering import Gathered
from support.drawing import rand, randn


def made_up(ece: float = 0.02, accuracy: float = 0.9, auroc: float = 0.95, seeds: int = 2) -> Gathered:
    """A subject whose loss-projected ECE, projected accuracy and projected AUROC are given; the network's are fixed."""

    def record(familiar: dict[str, float], score: str, found: float) -> dict[str, Any]:
        curve = [{"strength": s, "accuracy": familiar["accuracy"], "ece": familiar["ece"]} for s in (0.0, 1.0)]
        figures = {"fashion-mnist": {"auroc": found}, "kmnist": {"auroc": found}}
        return {
            "familiar": {"nll": 0.3, **familiar}, "scores": {score: figures}, "default": score, "published": score,
            "shift": {"rotation": curve},
        }  # fmt: skip

    methods = {
        "MAP": record({"accuracy": 0.9, "ece": 0.05}, "max_probability", 0.9),
        "ProjectedPosterior": record({"accuracy": accuracy, "ece": 0.05}, "max_variance", auroc),
        "LossProjectedPosterior": record({"accuracy": 0.9, "ece": ece}, "max_variance", 0.95),
    }
    run = {"seed": 0, "network": {"strangers": ["fashion-mnist", "kmnist"]}, "methods": methods}
    return Gathered({"name": "made up", "data": "mnist", "shifts": {"rotation": "degrees"}, "runs": seeds * [run]})


def verdicts(found: Gathered) -> dict[str, bool]:
    return {finding.claim: finding.holds for finding in findings(found)}


def test_verdicts_follow_the_figures() -> None:
    good, names = verdicts(made_up()), {
        "match": "The projected posterior matches", "calibration": "The loss-projected posterior improves",
        "kmnist": "The projected posterior tells kmnist better than the network", "shift": "Under rotation, the loss",
        "accuracy": "Under rotation, the projected", "table": "Table 1 has Brier",
    }  # fmt: skip

    def verdict(found: dict[str, bool], name: str) -> bool:
        (holds,) = (holds for claim, holds in found.items() if claim.startswith(names[name]))
        return holds

    assert [verdict(good, name) for name in names] == [True, True, True, True, True, False]
    assert not verdict(verdicts(made_up(ece=0.049)), "calibration")  # better by too little
    assert not verdict(verdicts(made_up(ece=0.06)), "shift")
    assert not verdict(verdicts(made_up(accuracy=0.88)), "match")
    assert not verdict(verdicts(made_up(accuracy=0.88)), "accuracy")
    assert not verdict(verdicts(made_up(auroc=0.85)), "kmnist")
    assert not verdicts(Gathered({**made_up().subject, "runs": []} | {"runs": [
        {"seed": 0, "network": {"strangers": []}, "methods": {}}], "data": ""}))  # fmt: skip


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "svhn", "cifar10"])
def test_bound_on_calibration_errors_holds_for_any_predictions_and_not_for_table_1(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for sharpness in (0.3, 3.0, 30.0):
        probs = (sharpness * randn(200, 10, generator=generator)).softmax(1)
        y = torch.where(rand(200, generator=generator) < 0.9, probs.argmax(1), 0)
        familiar = nb.metrics.confidence(probs), nb.metrics.accuracy(probs, y)
        for metric in ("ece", "brier"):
            bound = paper.bound(*familiar, metric)
            assert bound is not None
            assert getattr(nb.metrics, metric)(probs, y) <= bound + 1e-9
    assert {(method, metric) for method, metric, _, _ in paper.impossible(name)} == {
        (method, metric) for method in paper.METHODS for metric in ("brier", "ece")
    }
    assert not paper.impossible("unknown")
