"""Rows by layers: each rule gives the derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.jacobian.layer_rules import RULES
from nullbayes.linalg.pieces import OuterPiece
from support.layer_table import LAYERS, build, each_layer
from support.slow_answers import jacobian


@each_layer
def test_each_rule_gives_the_derivatives(name: str) -> None:
    model, x, y = build(name)
    rows = nb.OutputJacobian(model, [(x, y)])
    assert rows.route == "by layers (100% of the parameters)"
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))


@pytest.mark.parametrize("chosen", ["layer.weight", "layer.bias"])
@each_layer
def test_a_rule_works_for_one_parameter_of_a_layer_alone(name: str, chosen: str) -> None:
    model, x, y = build(name)
    if chosen in dict(model.named_parameters()):
        rows = nb.OutputJacobian(model, [(x, y)], parameters=chosen)
        assert rows.route == "by layers (100% of the parameters)"
        torch.testing.assert_close(rows.dense(), jacobian(model, x, [chosen]).flatten(0, 1))


def test_every_rule_is_tested() -> None:
    assert set(RULES) == {type(layer) for layer, _, _ in LAYERS.values()}


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).sum(1).tanh())


@pytest.mark.parametrize("options", [{"padding_idx": 2}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_options_of_an_embedding_do_not_hide_its_derivatives(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    special, plain, x = Words(**options).double(), Words().double(), torch.tensor([[2, 1, 2], [2, 2, 5]])
    with torch.no_grad():
        special.words.weight += 0.3  # the padding is zero at first
    plain.load_state_dict(special.state_dict())
    rows, wanted = (nb.OutputJacobian(model, [(x, torch.tensor([0, 1]))]).dense() for model in (special, plain))
    torch.testing.assert_close(rows, wanted)
    torch.testing.assert_close(rows, jacobian(plain, x).flatten(0, 1))
    assert special.words.padding_idx == options.get("padding_idx")
    assert special.words.sparse == options.get("sparse", False)
    assert special.words.scale_grad_by_freq == options.get("scale_grad_by_freq", False)


def test_a_convolution_with_one_position_is_held_as_factors() -> None:
    model, x, y = build("conv2d, one position")
    assert all(isinstance(piece, OuterPiece) for piece in nb.OutputJacobian(model, [(x, y)]).keep().pieces)


def test_a_rule_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = build("conv2d, reflect")
    right = RULES[nn.Conv2d]

    def wrong(module: Any, inputs: Tensor, gradients: Tensor) -> Any:
        return right(module, inputs.flip(-1), gradients)

    monkeypatch.setitem(RULES, nn.Conv2d, wrong)
    rows = nb.OutputJacobian(model, [(x, y)])
    assert rows.route == "vmap(jacrev)"
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))
