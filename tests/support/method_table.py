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
from nullbayes import baselines, detectors, predictive
from support import recipes
from support.models import BINARY, CLASSIFICATION, MLP, MULTILABEL, TASKS, Task

X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))
# the scores of the library, with the default first: those that need no samples, and all
OF_NETWORK = ("max_probability", *(kind for kind in predictive.OF_MEAN if kind != "max_probability"))
SCORES = ("entropy", *(kind for kind in predictive.SCORES if kind != "entropy"))
TEMPERED = tuple(task for task in TASKS if nb.likelihoods.resolve(task.likelihood).has_closed_form)  # by a temperature


@dataclass(frozen=True)
class Method:
    """A method, what its fit needs beside the data, and what it can do."""

    kind: type
    extra: Callable[[nn.Module], dict[str, Any]] = lambda model: {}  # what fit needs beside the data
    samples: bool = True  # whether it predicts
    prior: bool = True
    sampled_only: bool = False  # whether a prior has neither a curvature and its evidence nor exact variances
    custom: bool = False  # whether it takes a loss of one's own
    still: bool = False  # whether its one sample is the network itself
    tasks: tuple[Task, ...] = tuple(TASKS)  # that it can be fitted to, beside a loss of one's own
    positions: bool = True  # whether outputs may have positions
    pred_types: tuple[str, ...] = ("linearized", "sampled")
    scores: tuple[str, ...] = SCORES  # the first is the default, where there are probabilities

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def exact(self) -> bool:
        """Whether it knows variances exactly; a baseline has a curvature and a marginal likelihood as well."""
        return self.prior and not self.sampled_only

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
    Method(baselines.MAP, prior=False, custom=True, still=True, scores=OF_NETWORK),
    Method(
        baselines.TemperatureScaling,
        prior=False,
        still=True,
        tasks=TEMPERED,
        scores=OF_NETWORK,
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


def detector(kind: type, own: str, **able: Any) -> Method:
    """A detector: it predicts as the network does, and has one score more, or one of the network's scores first."""
    scores = (own, *(name for name in OF_NETWORK if name != own))
    return Method(kind, prior=False, still=True, scores=scores, **able)


_LOGITS = (CLASSIFICATION, BINARY, MULTILABEL)
_CLASSES_ONLY: dict[str, Any] = {"tasks": (CLASSIFICATION,), "positions": False}
DETECTORS = (
    detector(detectors.MSP, "max_probability", tasks=_LOGITS),
    detector(detectors.MaxLogit, "max_logit", tasks=_LOGITS),
    detector(detectors.Energy, "energy", tasks=_LOGITS),
    detector(detectors.GEN, "generalized_entropy", tasks=_LOGITS),
    detector(detectors.KNN, "knn", custom=True),
    detector(detectors.Mahalanobis, "mahalanobis", **_CLASSES_ONLY),
    detector(detectors.RelativeMahalanobis, "relative_mahalanobis", **_CLASSES_ONLY),
    detector(detectors.ViM, "vim", **_CLASSES_ONLY),
    detector(detectors.ReAct, "react", **_CLASSES_ONLY),
    detector(detectors.SCALE, "scale", **_CLASSES_ONLY),
    detector(detectors.FDBD, "fdbd", **_CLASSES_ONLY),
    detector(detectors.NNGuide, "nnguide", **_CLASSES_ONLY),
    detector(detectors.GradPCA, "gradpca", **_CLASSES_ONLY),
)
OWN = (Method(recipes.RelativeNoise, sampled_only=True, custom=True),)  # a baseline outside of the library
METHODS = (*PROJECTED, *BASELINES, *DETECTORS, *OWN)
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
each_baseline = pytest.mark.parametrize("method", [*BASELINES, *DETECTORS, *OWN], ids=lambda method: method.name)
each_sampler = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.samples], ids=lambda method: method.name
)  # fmt: skip


def answer(method: Method, posterior: Any) -> torch.Tensor:
    """What a method says about new inputs: samples, or its score, where it is a method for the sake of its score."""
    asked_for_samples = method.samples and method not in DETECTORS
    return posterior.predict(X_NEW).samples if asked_for_samples else posterior.ood_score(X_NEW)
