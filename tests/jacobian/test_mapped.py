"""Rows of many examples by one map, where torch adds in place to what they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from support.drawing import randn
from support.two_layers import D, X, Y, slow_rows, two


class LastState(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(4, 3, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.RNN, {}),
        (nn.RNN, {"nonlinearity": "relu", "bias": False}),
        (nn.GRU, {"num_layers": 2}),
        (nn.GRU, {"bidirectional": True}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"proj_size": 2}),
    ],
)
def test_recurrent_layers_work_under_vmap(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = LastState(kind, **options).to(D), randn(5, 6, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    rows = nb.OutputJacobian(model, [(x, model(x).detach())], "regression")
    assert rows.route.startswith("vmap(jacrev)")
    torch.testing.assert_close(rows.dense(), slow_rows(model, x))


def test_vmap_handles_in_place_addition_to_shared_tensors() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        state = model.a.bias.new_zeros(len(x), 30) + model.a.bias
        return model.h(state.add_(x @ model.a.weight.T).tanh())  # type: ignore[no-any-return]

    model = two(forward)
    rows = nb.OutputJacobian(model, [(X, Y)], "regression")
    torch.testing.assert_close(rows.dense(), slow_rows(model, X))
    assert "example by example" not in rows.route
