"""The table of all methods, the projected posteriors among them: what each needs, and what it can do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes import baselines
from support.models import CLASSIFICATION, MLP, Task

X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))
SCORES = ("max_variance", "sum_variance", "max_prob_variance", "entropy", "mutual_information")


@dataclass(frozen=True)
class Method:
    """A method, what its fit needs beside the data, and what it can do."""

    kind: type
    extra: Callable[[nn.Module], dict[str, Any]] = lambda model: {}  # what fit needs beside the data
    samples: bool = True  # whether it predicts
    prior: bool = True
    custom: bool = False  # whether it takes a loss of one's own
    pred_types: tuple[str, ...] = ("linearized", "sampled")
    scores: tuple[str, ...] = SCORES  # the first is the default

    @property
    def name(self) -> str:
        return self.kind.__name__

    def make(self, task: Task = CLASSIFICATION, model: nn.Module | None = None, **settings: Any) -> Any:
        return self.kind(model or MLP.build(task.outputs), task.likelihood, **settings)

    def fit(self, task: Task = CLASSIFICATION, n_samples: int = 4, seed: int = 0, **settings: Any) -> Any:
        model = settings.pop("model", None) or MLP.build(task.outputs)
        fitting = {"generator": torch.Generator().manual_seed(seed), "progress": False, **self.extra(model), **settings}
        return self.make(task, model).fit(fitting.pop("loader", [task.data()]), n_samples, **fitting)


def jitter(model: nn.Module, generator: torch.Generator, scale: float = 0.1) -> None:
    """Stand in for an epoch of training: every parameter moves a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter += scale * drawn.to(parameter)


def epochs(model: nn.Module) -> dict[str, Any]:
    """For SWAG: a function that trains for one epoch."""
    generator = torch.Generator().manual_seed(5)
    return {"train": lambda copied: jitter(copied, generator), "n_models": 6}


def members(model: nn.Module) -> dict[str, Any]:
    """For deep ensembles: a function that trains a network from a seed."""

    def train(seed: int) -> nn.Module:
        member = copy.deepcopy(model)
        jitter(member, torch.Generator().manual_seed(seed), 0.5)
        return member

    return {"train": train}


PROJECTED = (Method(nb.ProjectedPosterior, custom=True), Method(nb.LossProjectedPosterior, custom=True))
BASELINES = (
    Method(
        baselines.MAP,
        prior=False,
        custom=True,
        scores=("max_probability", "max_logit", "energy", "generalized_entropy", "entropy"),
    ),
    Method(baselines.DiagonalLaplace),
    Method(baselines.LastLayerLaplace),
    Method(baselines.KroneckerLaplace),
    Method(baselines.LinearizedLaplace),
    Method(baselines.LanczosLaplace),
    Method(baselines.SCOD, scores=("scod", *SCORES)),
    Method(baselines.LocalEnsemble, samples=False, prior=False, scores=("local_ensemble",)),
    Method(baselines.SketchedLanczos, samples=False, prior=False, scores=("sketched_lanczos",)),
    Method(baselines.SWAG, epochs, prior=False, custom=True, pred_types=("sampled",)),
    Method(baselines.DeepEnsemble, members, prior=False, custom=True, pred_types=("sampled",)),
)
METHODS = (*PROJECTED, *BASELINES)
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
each_baseline = pytest.mark.parametrize("method", BASELINES, ids=lambda method: method.name)
each_sampler = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.samples], ids=lambda method: method.name
)  # fmt: skip


def answer(method: Method, posterior: Any) -> torch.Tensor:
    """What a method says about new inputs: samples, or its score."""
    return posterior.predict(X_NEW).samples if method.samples else posterior.ood_score(X_NEW)
