"""Small trained networks in float64, the same at every call: nothing here may be changed by a test."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from support.drawing import randn
from support.paper import oracle


@dataclass(frozen=True, eq=False)
class Trained:
    """A network, the data that it was trained on, and inputs that it has not seen."""

    model: nn.Module
    x: Tensor
    y: Tensor
    new: Tensor
    likelihood: str
    loss: Callable[[Tensor, Tensor], Tensor]  # outputs (n, O), targets -> (n,)

    @property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        half = (len(self.x) + 1) // 3  # two batches, of unequal size
        return [(self.x[:half], self.y[:half]), (self.x[half:], self.y[half:])]

    @property
    def n_outputs(self) -> int:
        return self.model(self.x[:1]).shape[1]

    @cached_property
    def jacobian(self) -> oracle.Matrix:
        return oracle.jacobian(self.model, self.x)

    @cached_property
    def loss_gradients(self) -> oracle.Matrix:
        return oracle.loss_gradients(self.model, self.x, self.y, self.loss)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def mlp(*widths: int, seed: int, bias: bool = True, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layer = nn.Linear(n_in, n_out, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(randn(parameter.shape, generator=generator, dtype=torch.float64) / n_in**0.5)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], steps: int = 100) -> None:
    """Descend the gradient with momentum."""
    weights = list(model.parameters())
    velocities = [torch.zeros_like(w) for w in weights]
    for _ in range(steps):
        gradients = torch.autograd.grad(loss(model(x), y).mean(), weights)
        with torch.no_grad():
            for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                velocity.mul_(0.9).sub_(0.1 * gradient)
                weight.add_(velocity)


def gaussian(*shape: int, seed: int) -> Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def classifier() -> Trained:
    """20 examples of 3 classes: 60 rows of outputs, 20 of losses, 99 parameters."""
    x = gaussian(20, 4, seed=1)
    y = (x @ gaussian(4, 3, seed=2) + 0.5 * gaussian(20, 3, seed=3)).argmax(1)
    model = mlp(4, 12, 3, seed=4)
    train(model, x, y, cross_entropy)
    return Trained(model, x, y, 3 * gaussian(8, 4, seed=5), "classification", cross_entropy)


@cache
def regressor() -> Trained:
    """24 examples of one output: 24 rows of either kind, 61 parameters."""
    x = gaussian(24, 3, seed=6)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * gaussian(24, 1, seed=7)
    model = mlp(3, 12, 1, seed=8)
    train(model, x, y, squared_error)
    return Trained(model, x, y, 3 * gaussian(8, 3, seed=9), "regression", squared_error)


@cache
def underparametrized() -> Trained:
    """80 examples of two outputs: 160 rows, 22 parameters, and no kernel at all."""
    x = gaussian(80, 2, seed=10)
    y = torch.stack([torch.sin(2 * x[:, 0]), x[:, 0] * x[:, 1]], dim=1)
    model = mlp(2, 4, 2, seed=11)
    train(model, x, y, squared_error)
    return Trained(model, x, y, 3 * gaussian(8, 2, seed=12), "regression", squared_error)
