"""The paper's experiments: what ``nullbayes reproduce NAME`` runs. They use the library's public names alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nullbayes.experiments.frame import Experiment

# Name -> module with EXPERIMENTS, a dictionary by name. Nothing is imported until it is asked for.
_MODULES = {
    "toy": "toy", "mnist": "digits", "fashion-mnist": "digits", "cifar10": "residual", "svhn": "residual",
    "celeba": "celeba", "imagenet": "imagenet", "vae": "vae", "text": "sentences", "uci": "uci",
    "calibration": "calibration", "convergence": "convergence",
}  # fmt: skip


def names() -> list[str]:
    """Return the names of all experiments."""
    return list(_MODULES)


def find(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name not in _MODULES:
        msg = f"There is no experiment {name!r}: there are {', '.join(_MODULES)}."
        raise KeyError(msg)
    module = importlib.import_module(f"nullbayes.experiments.{_MODULES[name]}")
    experiments: dict[str, Experiment] = module.EXPERIMENTS
    return experiments[name]
