"""Choosing a route and estimating costs takes no longer for examples with many outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.jacobian.routes import ByLayers
from support.drawing import randn
from support.slow_answers import jacobian

OUTPUTS = 40


class Decoder(nn.Module):
    """One of many outputs may use a weight in a way that no hook sees."""

    def __init__(self, hidden: int | None = None) -> None:
        super().__init__()
        self.first, self.last, self.hidden = nn.Linear(3, 4), nn.Linear(4, OUTPUTS), hidden

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        if self.hidden is not None:
            out = out.clone()
            out[:, self.hidden] = out[:, self.hidden] + self.first.weight.sum()
        return out


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (randn(5, width, generator=generator, dtype=torch.float64) for width in (3, OUTPUTS))
    return [(x, y)]


def build(hidden: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(hidden).double()


def test_a_route_is_chosen_with_few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    backward = ByLayers._backward

    def watched(self: ByLayers, values: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        widths.append(values.shape[1])
        return backward(self, values, outputs)

    monkeypatch.setattr(ByLayers, "_backward", watched)
    rows = nb.OutputJacobian(build(), data(), "regression")
    nb.plan(build(), data(), likelihood="regression")
    assert set(widths) == {16}
    rows.dense()
    assert max(widths) == OUTPUTS


@pytest.mark.parametrize("hidden", [0, OUTPUTS - 1])
def test_a_weight_with_a_second_use_in_one_output_of_many_is_noticed(hidden: int) -> None:
    model, batches = build(hidden), data()
    rows = nb.OutputJacobian(model, batches, "regression")
    assert rows.route == "vmap(jacrev)"
    torch.testing.assert_close(rows.dense(), jacobian(model, batches[0][0]).flatten(0, 1))


@pytest.mark.parametrize("hidden", [None, 7])
def test_predicted_sizes_and_costs_match_the_formed_rows(hidden: int | None) -> None:
    rows = nb.OutputJacobian(build(hidden), data(), "regression")
    held = rows.keep()
    assert rows.costs().held_bytes == sum(piece.costs().n_bytes for piece in held.pieces)
    assert rows.costs("half").held_bytes == sum(piece.halved().costs().n_bytes for piece in held.pieces)
    for name in ("gram_flops", "product_flops", "normal_flops"):
        assert getattr(rows.costs(), name) == getattr(held.costs(), name)
