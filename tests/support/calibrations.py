"""Small fitted posteriors and held-out data for the tests of `calibrate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from support.models import CLASSIFICATION, Task
from support.trained import draw, trained

X_NEW = draw(CLASSIFICATION, 30, 9)[0]


def fitted(task: Task = CLASSIFICATION, kind: Any = nb.ProjectedPosterior, n_samples: int = 4, **settings: Any) -> Any:
    posterior = kind(trained(task), task.likelihood, prior_precision=10.0, **settings)
    return posterior.fit(*draw(task), n_samples, generator=torch.Generator().manual_seed(0), progress=False)


def held(n: int = 100, seed: int = 1, task: Task = CLASSIFICATION) -> tuple[Tensor, Tensor]:
    return draw(task, n, seed)
