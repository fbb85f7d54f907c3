"""Networks of two layers with a forward of one's own, data for them, and their rows by a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import nullbayes as nb
from support.drawing import randn
from support.zoo import Wired

D = torch.float64
X, Y = (randn(9, width, generator=torch.Generator().manual_seed(width), dtype=D) for width in (4, 2))
X[:3, 0] = torch.tensor([-1.0, 0.0, 1.0])  # in order, and none of them beyond 1
X[3:, 0] = torch.tensor([0.5, -0.5, -2.0, 3.0, 2.0, 4.0])


def two(forward: Callable[..., Tensor], **more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Wired(forward, a=nn.Linear(4, 30), h=nn.Linear(30, 2), **more).double()


def fit_two_layers(model: nn.Module, x: Any = X, y: Tensor = Y, **options: Any) -> Any:
    return nb.ProjectedPosterior(model, "regression", prior_precision=1.0, **options).fit([(x, y)], 8, progress=False)


def slow_rows(model: nn.Module, x: Tensor) -> Tensor:
    """One call of autograd for each output of each example; the model may be one that cannot be copied."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = [torch.autograd.grad(value, parameters, retain_graph=True) for value in model(x).flatten()]
    return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in found])
