"""Fits of both projected posteriors for every likelihood, and the rows that they project against."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.projectors import Alternating, ExactDual, Krylov
from support.drawing import seeded
from support.models import BINARY, CLASSIFICATION, MLP, MULTILABEL, TASKS, Task
from support.slow_answers import jacobian, loss_jacobian

EXACT = ExactDual()
ITERATIVE = Krylov(Alternating(block_rows=4), rtol=1e-9)
X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))
X, Y = CLASSIFICATION.data(n=5)
DATA = [(X, Y)]
KINDS = (nb.ProjectedPosterior, nb.LossProjectedPosterior)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def fit_mlp(
    kind: type = nb.ProjectedPosterior, task: Task = CLASSIFICATION, n_samples: int = 5, seed: int = 0, **settings: Any
) -> Any:
    """Fit the small MLP with the closed form of the prior precision; test_promise.py tests the default precision."""
    model = MLP.build(task.outputs)
    settings = {"projector": EXACT, "generator": seeded(seed), "progress": False, **settings}
    return kind(model, task.likelihood, prior_precision="optimal").fit([task.data()], n_samples, **settings)


def attempt(
    model: nn.Module | None = None, data: Any = DATA, likelihood: Any = "classification", **settings: Any
) -> Any:
    """A fit as a user makes it, right or wrong."""
    posterior = nb.ProjectedPosterior(model if model is not None else MLP.build(), likelihood)
    return posterior.fit(data, 4, progress=False, **settings)


def rows_of(kind: type, task: Task) -> Tensor:  # (R, P)
    """The rows that a fit of that kind projects against, from the slow oracles."""
    model, (x, y) = MLP.build(task.outputs), task.data()
    return jacobian(model, x).flatten(0, 1) if kind is nb.ProjectedPosterior else loss_jacobian(model, x, y, task)


def averaged(task: Task, outputs: Tensor, changes: Tensor) -> Tensor | None:  # (n, O), (S, n, O)
    """Probabilities averaged in closed form, written out example by example and class by class."""
    if task not in (CLASSIFICATION, BINARY, MULTILABEL):
        return None
    probs = torch.zeros_like(outputs)
    for i, f in enumerate(outputs):
        top = int(f.argmax()) if task is CLASSIFICATION else None
        for c in range(len(f)):
            moves = changes[:, i, c] if top is None else changes[:, i, c] - changes[:, i, top]
            logit = f[c] if top is None else f[c] - f[top]
            probs[i, c] = logit / (1 + math.pi / 8 * moves.var()).sqrt()
    found = probabilities(task, probs)
    assert found is not None
    return found


def probabilities(task: Task, outputs: Tensor) -> Tensor | None:
    if task is CLASSIFICATION:
        return outputs.exp() / outputs.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-outputs).exp()) if task in (BINARY, MULTILABEL) else None
