"""Networks that change their own parameters are refused, and left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.errors import ModelError
from support.drawing import randn
from support.two_layers import D, X, fit_two_layers, two


def looked_up(bag: bool = False) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        ids = (x[:, :3] > 0).long()
        found = F.embedding_bag(ids, self.w, max_norm=1.0) if bag else F.embedding(ids, self.w, None, 1.0).mean(1)
        return self.h(torch.tanh(self.a(x))) + found

    return forward


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.w.clamp_(min=0.0)
    return self.h(torch.tanh(self.a(x))) + self.w[0]


def by_data(self: Any, x: Tensor) -> Tensor:
    self.w.data.clamp_(min=0.0)
    return self.h(torch.tanh(self.a(x))) + self.w[0]


def by_item(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.w[self.w < 0] = 0.0
    return self.h(torch.tanh(self.a(x))) + self.w[0]


def by_out(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.clamp(self.w, min=0.0, out=self.w)
    return self.h(torch.tanh(self.a(x))) + self.w[0]


def by_list(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_clamp_min_([self.w], 0.0)
    return self.h(torch.tanh(self.a(x))) + self.w[0]


def by_assignment(self: Any, x: Tensor) -> Tensor:
    self.w.data = self.w.data.clamp(min=0.0)
    return self.h(torch.tanh(self.a(x))) + self.w[0]


WRITING = {
    "embedding": (looked_up(), "embedding with max_norm, which changes 'w'.* leave max_norm out"),
    "embedding_bag": (looked_up(bag=True), "embedding_bag with max_norm, which changes 'w'.* leave max_norm out"),
    "no_grad": (without_gradients, "changes its parameter 'w' in place .* weight.clamp"),
    "data": (by_data, "changes its parameter 'w' in place .* weight.clamp"),
    "item": (by_item, "changes its parameter 'w' in place .* weight.clamp"),
    "out": (by_out, "changes its parameter 'w' in place .* weight.clamp"),
    "list": (by_list, "changes its parameter 'w' in place .* weight.clamp"),
    "assignment": (by_assignment, "changes its parameter 'w' in place .* weight.clamp"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("forward", "fragment"), WRITING.values(), ids=WRITING)
def test_a_network_that_changes_its_parameters_in_place_is_refused_and_left_as_it_was(
    forward: Callable[[Any, Tensor], Tensor], fragment: str, frozen: bool
) -> None:
    model = two(forward)
    model.w = nn.Parameter(3 * randn(2, 2, generator=torch.Generator().manual_seed(0), dtype=D), not frozen)
    before = model.w.detach().clone()
    with pytest.raises(ModelError, match=fragment):
        fit_two_layers(model)
    assert torch.equal(model.w, before)


def test_a_network_that_writes_the_values_that_are_there_is_refused_where_autograd_fails() -> None:
    model = two(without_gradients)
    model.w = nn.Parameter(torch.ones(2, 2, dtype=D))
    with pytest.raises(ModelError, match="changes its parameter 'w' in place"):
        fit_two_layers(model)


def test_a_parameter_that_is_assigned_the_values_it_has_is_refused_if_it_is_fixed_and_taken_if_it_varies() -> None:
    model = two(by_assignment)
    model.w = nn.Parameter(torch.ones(2, 2, dtype=D))
    fit_two_layers(model)
    model.w.requires_grad_(False)
    with pytest.raises(ModelError, match="changes its parameter 'w' in place"):
        fit_two_layers(model)


class Merging(nn.Linear):
    """Adds its adapter to its weights in evaluation mode, as some do."""

    def __init__(self) -> None:
        super().__init__(4, 6)
        self.down, self.up, self.merged = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(6, 2)), False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        own = F.linear(x, self.weight, self.bias)
        return own if self.merged else own + x @ self.down.T @ self.up.T


def test_a_model_whose_weights_change_in_eval_mode_is_refused_and_restored() -> None:
    model = nn.Sequential(Merging(), nn.Tanh(), nn.Linear(6, 2)).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=r"'0.weight' changes when .* call model.eval\(\) before"):
        nb.ProjectedPosterior(model, "regression")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.eval()
    assert (fit_two_layers(model).predict(X).mean - model(X).detach()).abs().max() < 1e-6
