"""Rows and predictions are right where only later examples show what a network does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import nullbayes as nb
from support.drawing import randn
from support.two_layers import D, X, Y, fit_two_layers, slow_rows, two


def sorted_batch(self: Any, x: Tensor) -> Tensor:
    """As for packing: the batch is sorted, and put back in order."""
    order = torch.argsort(x[:, 0])
    return self.h(torch.tanh(self.a(x[order]))[torch.argsort(order)])


def gate(x: Tensor) -> Tensor:
    """Closed for the first three examples."""
    return (x[:, :1].abs() - 1).relu()


def used_again(self: Any, x: Tensor) -> Tensor:
    z = torch.tanh(self.a(x))
    return self.h(z + gate(x) * F.linear(z[:, :4], self.a.weight))


def branch(self: Any, x: Tensor) -> Tensor:
    return self.h(torch.tanh(self.a(x))) + gate(x) * self.b(x)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.register_forward_hook(lambda module, inputs, output: 3 * output)
    return layer


LATER = {
    "sorted": lambda: two(sorted_batch),
    "weight used again": lambda: two(used_again),
    "pruned": lambda: two(branch, b=prune.l1_unstructured(nn.Linear(4, 2), "weight", 0.5)),
    "hooked": lambda: two(branch, b=hooked()),
    "old weight norm": lambda: two(branch, b=nn.utils.weight_norm(nn.Linear(4, 2))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch prefers parametrizations
@pytest.mark.parametrize("make", LATER.values(), ids=LATER)
def test_rows_are_right_where_later_examples_take_another_branch(make: Callable[[], nn.Module]) -> None:
    model = make()
    rows = nb.OutputJacobian(model, [(X, Y)], "regression")
    torch.testing.assert_close(rows.dense(), slow_rows(model, X))
    posterior = fit_two_layers(model)
    assert (posterior.predict(X).samples - model(X).detach()).abs().max() < 1e-6


def test_a_route_that_turns_out_wrong_is_replaced_while_rows_are_formed() -> None:
    model = two(used_again)
    rows = nb.OutputJacobian(model, [(X, Y)], "regression")
    rows.working_bytes = 2 * rows._layers.example_bytes
    assert rows.route.startswith("by layers")
    held = rows.keep()
    assert rows.route == "vmap(jacrev)"
    torch.testing.assert_close(held.dense(), slow_rows(model, X))


FIRST_PREDICTIONS = {
    "sorted": lambda: two(sorted_batch),
    "in one": lambda: two(lambda self, x: self.h(torch.tanh(self.a(x[None])))[0]),
    "branch": lambda: two(used_again),
}


@pytest.mark.parametrize("make", FIRST_PREDICTIONS.values(), ids=FIRST_PREDICTIONS)
def test_the_order_of_predictions_does_not_matter(make: Callable[[], nn.Module]) -> None:
    posterior = fit_two_layers(make())
    fresh, new = copy.deepcopy(posterior), randn(5, 4, generator=torch.Generator().manual_seed(7), dtype=D) * 2
    wanted = fresh.predict(new).samples
    posterior.predict(new[:1])
    torch.testing.assert_close(posterior.predict(new).samples, wanted)


def test_values_computed_once_for_all_examples_are_not_scaled_by_the_batch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.a(x))) * self.b(torch.ones(1, 3, dtype=D, device=x.device)).sum()

    model = two(forward, b=nn.Linear(3, 2))
    posterior = fit_two_layers(model)
    posterior.predict(X[:1])
    torch.testing.assert_close(posterior.predict(X).samples.mean(0), model(X).detach(), rtol=0, atol=1e-6)


def test_inputs_of_other_shapes_are_predicted_after_each_other() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:  # (n, T, 4) -> (n, T)
        return self.gain.weight[0, 0] * self.h(torch.tanh(self.a(x)))[..., 0]

    model = two(forward, gain=nn.Linear(1, 1, bias=False))
    posterior = fit_two_layers(model, X[:, None].expand(-1, 3, -1).clone(), Y[:, :1].expand(-1, 3).clone())
    for length in (1, 5, 2):
        assert posterior.predict(X[:4, None].expand(-1, length, -1)).mean.shape == (4, length)
