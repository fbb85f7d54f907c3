"""Networks that learned from 1,000 examples: a posterior fitted to few of them shows whether its scale is right."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from nullbayes.likelihoods import resolve
from support.drawing import randn
from support.models import Task

N = 60


def draw(task: Task, n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets; of the first seed, those that the network was trained on."""
    x, y = _drawn(task, max(n, 1000), seed)
    return x[:n], y[:n]


def _drawn(task: Task, n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = randn(n, 4, generator=generator, dtype=torch.float64)
    bend = x + 0.5 * x.roll(1, 1).sin()
    return x, task.learnable(bend, generator)


@functools.cache
def trained(task: Task) -> nn.Module:
    """A network of one hidden layer that has learned from 1,000 examples."""
    x, y = draw(task, 1000)
    loss = resolve(task.likelihood).loss
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, task.outputs)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(250):
        optimizer.zero_grad()
        loss(model(x), y).mean().backward()
        optimizer.step()
    return model.eval()
