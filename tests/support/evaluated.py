"""Data and fits for the tests of `nb.evaluate`, and the figures of detection by `nb.metrics`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.evaluation import EvaluationRow
from support.drawing import randint, randn
from support.models import CLASSIFICATION, MLP, Task

N, M = 60, 40


def drawn(seed: int, n: int, scale: float = 1.0) -> Tensor:
    return scale * randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(kind: type, task: Task = CLASSIFICATION, **settings: Any) -> Any:
    return kind(MLP.build(task.outputs), task.likelihood, **settings).fit(
        *task.data(), 5, generator=torch.Generator().manual_seed(0), progress=False
    )


def labels(n: int = N, classes: int = 3) -> Tensor:
    return randint(classes, (n,), generator=torch.Generator().manual_seed(3))


X, Y = drawn(1, N), labels()
FAR, NEAR = drawn(2, M, 4.0), drawn(3, M - 10)
STRANGERS = {"far": FAR, "near": NEAR}


def check_detection(row: EvaluationRow, method: Any, kind: str | None, inside: Any, strangers: dict[str, Any]) -> None:
    familiar = method.ood_score(inside, kind)
    assert list(row.strangers) == list(strangers)
    for name, outside in strangers.items():
        scores, found = method.ood_score(outside, kind), row.strangers[name]
        assert found.auroc == nb.metrics.auroc(familiar, scores)
        assert found.aupr == nb.metrics.aupr(familiar, scores)
        assert found.fpr95 == nb.metrics.fpr95(familiar, scores)
