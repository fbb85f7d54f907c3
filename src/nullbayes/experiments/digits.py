"""The experiments ``mnist`` and ``fashion-mnist``: LeNet, every method, and rotated images."""

from __future__ import annotations

import functools

from torch import Tensor

from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings
from nullbayes.experiments.shifts import rotations
from nullbayes.experiments.study import Sizes, Subject, run_study
from nullbayes.experiments.study_page import study_page
from nullbayes.experiments.tasks import Inputs, Task, lenet_images

FULL = Sizes(n=60_000, epochs=0, held_out=1000, test=9000, shifted=2000)
QUICK = Sizes(
    n=400, epochs=30, held_out=300, test=400, shifted=100, samples=10, members=2, budget=10, pictures=4
)  # fmt: skip
ANGLES = tuple(float(angle) for angle in range(0, 181, 15))
_PARAMETERS = 44_426  # of LeNet
_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}


def study(name: str, settings: Settings, sizes: Sizes, angles: tuple[float, ...] = ANGLES) -> Results:
    """Return all that is measured of LeNet on "mnist" or "fashion-mnist", and on images turned by angles in degrees."""
    task = functools.partial(_task, own=name, sizes=sizes)
    subject = Subject(f"LeNet, {name}", task, _picture, name, (rotations(angles),))
    return run_study(settings, [subject], sizes)


def _task(settings: Settings, own: str, sizes: Sizes) -> Task:
    return lenet_images(settings, own, sizes.n, sizes.epochs, held_out=sizes.held_out, test=sizes.test)


def _picture(x: Inputs) -> Tensor:
    assert isinstance(x, Tensor)
    return x[0]


def _sizes(settings: Settings) -> Sizes:
    return QUICK if settings.quick else FULL


def _estimate(settings: Settings) -> Estimate:
    """Return what a run will take: seconds for each seed are rough, those on a CPU without ``quick`` a guess."""
    sizes, cuda = _sizes(settings), settings.device.type == "cuda"
    if settings.quick:
        seconds, memory = 80.0, 1 << 30
    else:
        seconds = 100.0 if cuda else 0.3 * sizes.n
        memory = 12 * _PARAMETERS**2  # a Gram matrix of the parameters, and what factors it
    return Estimate(settings.seeds * seconds, memory, 4 * _PARAMETERS * settings.seeds * (1 + sizes.members))


def _experiment(name: str) -> Experiment:
    title = _TITLES[name]
    about = f"LeNet on {title}: predictions, strangers and rotated images, by every method, beside the paper's figures."
    return Experiment(
        name, about, ("mnist", "fashion-mnist", "kmnist"), _estimate,
        run=lambda settings: study(name, settings, _sizes(settings)),
        page=functools.partial(study_page, title=f"LeNet on {title}"), by_method=True,
    )  # fmt: skip


EXPERIMENTS = {name: _experiment(name) for name in _TITLES}
