"""The experiments ``cifar10`` and ``svhn``: residual networks, every method, fog and blur.

A ResNet of three groups of three blocks is trained on the images at hand; for CIFAR-10, the published ResNet-20 is
studied, too. Rows are some of the training images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.experiments.datasets import IMAGENET_MEAN, IMAGENET_STD
from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings
from nullbayes.experiments.judging import DETECTORS
from nullbayes.experiments.shifts import corruptions
from nullbayes.experiments.study import Sizes, Subject, run_study
from nullbayes.experiments.study_page import study_page
from nullbayes.experiments.tasks import Inputs, Task, published_resnet, trained_resnet

WEIGHTS = "weights/resnet20-12fca82f.th"  # of the published network
_PARAMETERS, _IMAGES = 272_474, 15_000  # of the network, and to train it with
_TITLES = {"cifar10": "CIFAR-10", "svhn": "SVHN"}


@dataclass(frozen=True)
class ResidualSizes(Sizes):
    """How large a study of residual networks is.

    Attributes
    ----------
    parameters : tuple of str
        Globs of the parameters that may vary.
    strengths : int
        Of fog and blur, beside none.
    published : int
        Training examples that are rows, for the published network.
    """

    parameters: tuple[str, ...] = ("*",)
    strengths: int = 5
    published: int = 6000


_FULL = ResidualSizes(n=3000, epochs=30, held_out=1000, test=2000, shifted=1000, members=3)
FULL = {"svhn": _FULL, "cifar10": replace(_FULL, epochs=100)}
QUICK = ResidualSizes(
    n=100, published=100, epochs=1, held_out=200, test=200, shifted=50, samples=10, budget=10, pictures=4, strengths=2,
    parameters=("layer3.2.*", "linear.*"),
    only=("MAP", "ProjectedPosterior", "LossProjectedPosterior", "DiagonalLaplace", "LastLayerLaplace", "SWAG",
          *DETECTORS, "TemperatureScaling"),
)  # fmt: skip


def study(name: str, settings: Settings, sizes: ResidualSizes) -> Results:
    """Return all that is measured of residual networks on "cifar10" or "svhn"."""
    shifts = corruptions(IMAGENET_MEAN, IMAGENET_STD, sizes.strengths)
    common = functools.partial(Subject, show=_picture, data=name, shifts=shifts)
    subjects = [common(f"ResNet, {name}", functools.partial(_trained, name=name, sizes=sizes))]
    notes = []
    if name == "cifar10" and settings.data is not None and (settings.data / WEIGHTS).is_file():
        subjects.append(common("ResNet-20, published weights", functools.partial(_published, sizes=sizes), seeds=1))
    elif name == "cifar10":
        notes.append(f"The published ResNet-20 is left out: {WEIGHTS} is not in the data folder.")
    return {"notes": notes, **run_study(settings, subjects, sizes)}


def _trained(settings: Settings, name: str, sizes: ResidualSizes) -> Task:
    parts = {"held_out": sizes.held_out, "test": sizes.test}
    return trained_resnet(settings, name, sizes.n, sizes.epochs, sizes.parameters, **parts)


def _published(settings: Settings, sizes: ResidualSizes) -> Task:
    return published_resnet(settings, sizes.published, sizes.parameters, held_out=sizes.held_out, test=sizes.test)


def _picture(x: Inputs) -> Tensor:
    """Return an image between 0 and 1."""
    assert isinstance(x, Tensor)
    mean, std = (torch.tensor(values).to(x)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (x * std + mean).clamp(0.0, 1.0)


def _sizes(name: str, settings: Settings) -> ResidualSizes:
    return QUICK if settings.quick else FULL[name]


def _estimate(name: str) -> Callable[[Settings], Estimate]:
    def estimate(settings: Settings) -> Estimate:
        """Return what a run will take: training, and fits of every method."""
        sizes, cuda = _sizes(name, settings), settings.device.type == "cuda"
        networks = 1 + (sizes.members if not sizes.only else 0)
        training = networks * sizes.epochs * _IMAGES * (6e-5 if cuda else 6e-3)
        fits = 200.0 if settings.quick else 150.0 if cuda else 60.0 * sizes.n
        seconds = settings.seeds * (training + fits) + (fits if name == "cifar10" else 0.0)
        memory = 60 << 30 if cuda and not settings.quick else 2 << 30
        return Estimate(seconds, memory, 4 * _PARAMETERS * settings.seeds * networks)

    return estimate


def _experiment(name: str) -> Experiment:
    title = _TITLES[name]
    about = f"Residual networks on {title}: predictions, strangers, fog and blur, by every method, beside the paper's."
    return Experiment(
        name, about, ("cifar10", "cifar100", "svhn"), _estimate(name),
        run=lambda settings: study(name, settings, _sizes(name, settings)),
        page=functools.partial(study_page, title=f"Residual networks on {title}"), by_method=True,
    )  # fmt: skip


EXPERIMENTS = {name: _experiment(name) for name in _TITLES}
