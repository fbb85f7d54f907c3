"""Networks that hide parameters from autograd are refused, with their names; rough derivatives hide nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nullbayes.errors import ModelError
from support.two_layers import X, Y, fit_two_layers, two


def listed() -> nn.Module:
    model = two(lambda self, x: self.h(torch.tanh(F.linear(x, self.kept[0], self.a.bias))))
    model.kept = [model.a.weight]
    return model


def adapted() -> nn.Module:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))), b=nn.Linear(4, 30))
    adapter = model.b
    model.a.register_forward_hook(lambda module, inputs, output: output + adapter(inputs[0]))
    return model


def replaced() -> nn.Module:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    old = model.a.forward
    model.a.forward = lambda x: 2 * old(x)
    return model


def reentrant(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(self.a(x))
    return self.h(h) + self.words((x[:, :3] > 0).long())


class RoundedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


HIDDEN = {
    "detach": (lambda: two(lambda self, x: self.h(torch.tanh(self.a(x)).detach())), "hidden by detach"),
    "data": (lambda: two(lambda self, x: self.h(torch.tanh(self.a(x)).data)), "hidden by detach"),
    "no_grad, and no forward mode": (lambda: two(reentrant, words=nn.EmbeddingBag(2, 2)), "hidden by detach"),
    "a backward of its own": (lambda: two(lambda self, x: self.h(RoundedBack.apply(self.a(x)))), "rounding"),
    "all detached": (lambda: two(lambda self, x: self.h(self.a(x)).detach()), "do not depend on the parameters"),
    "in a list": (listed, "uses 'a.weight' by another way"),
    "in a hook": (adapted, "uses 'b.weight' by another way"),
    "forward replaced": (replaced, "uses 'a.weight' by another way"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("make", "fragment"), HIDDEN.values(), ids=HIDDEN)
def test_parameters_hidden_from_autograd_are_refused(
    make: Callable[[], nn.Module], fragment: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ModelError, match=fragment):
        fit_two_layers(make().to(dtype), X.to(dtype), Y.to(dtype))


def padded(self: Any, x: Tensor) -> Tensor:
    return self.h(F.embedding((x[:, :3] > 1.5).long(), self.words.weight, padding_idx=1).sum(1) + self.a(x))


def test_padding_hidden_from_autograd_is_refused_by_every_route() -> None:
    model = two(padded, words=nn.Embedding(2, 30))
    with pytest.raises(ModelError, match="hidden by detach"):  # F.embedding leaves out the derivative of the padding
        fit_two_layers(model, X + 2)


def dead() -> nn.Module:
    """Units that are zero, where a ReLU has its kink."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    with torch.no_grad():
        model[0].weight[:5] = 0
        model[0].bias[:5] = 0
    return model


def narrow() -> nn.Module:
    """A normalization that a small step turns over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32, eps=1e-12), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        model[0].weight *= 1e-5
        model[0].bias *= 1e-5
    return model


class Single(nn.Sequential):
    """Works in float32 only, so that differences have few digits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def test_finite_differences_too_rough_to_judge_do_not_refuse_a_network() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        layers = nn.Linear(4, 32), nn.LayerNorm(32, eps=1e-12), nn.ReLU(), nn.Linear(32, 2)
        with torch.no_grad():
            layers[0].weight *= 1e-5
            layers[0].bias *= 1e-5
        assert fit_two_layers(Single(*layers), X.float(), Y.float()).report.converged


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [dead, narrow])
def test_kinks_and_steep_networks_are_not_taken_for_hidden_parameters(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    assert fit_two_layers(make().to(dtype), X.to(dtype), Y.to(dtype)).report.converged
