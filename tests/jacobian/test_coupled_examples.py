"""Randomness and the influence of other examples are seen, whatever offset all outputs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.errors import ModelError
from nullbayes.jacobian.checks import AutogradReference, check_examples
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.row_builder import RowBuilder
from support.drawing import randn
from support.two_layers import X, Y


def drawn(*shape: int) -> Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(1))


class Shifted(nn.Module):
    """Two outputs around an offset, which is a constant or a bias."""

    def __init__(self, inner: Callable[[Tensor], Tensor], offset: float, *, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.inner = nn.Linear(4, 8), nn.Linear(8, 2), inner
        self.offset = 0.0 if learned else offset
        with torch.no_grad():
            self.h.bias += offset if learned else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.inner(torch.tanh(self.a(x)))) + self.offset


INFLUENCED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "random": (lambda z: F.dropout(z, 0.3, training=True), "answers differently when asked twice"),
    "a little random": (lambda z: z + 0.1 * torch.randn_like(z), "answers differently when asked twice"),
    "centred": (lambda z: z - z.mean(0), "depends on the other examples"),
    "centred where there are many": (lambda z: z - z.mean(0) * (len(z) > 8), "influence each other"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("learned", [False, True], ids=["constant", "bias"])
@pytest.mark.parametrize("offset", [0.0, 100.0, 2000.0])
@pytest.mark.parametrize(("inner", "fragment"), INFLUENCED.values(), ids=INFLUENCED)
def test_an_offset_hides_neither_randomness_nor_other_examples(
    inner: Callable[[Tensor], Tensor], fragment: str, offset: float, learned: bool, dtype: torch.dtype
) -> None:
    model, x = Shifted(inner, offset, learned=learned).to(dtype), drawn(20, 4).to(dtype)
    with pytest.raises(ModelError, match=fragment):
        nb.ProjectedPosterior(model, "regression").fit(x, drawn(20, 2).to(dtype), 2, progress=False)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda z: z,
    "in bfloat16": lambda z: z.bfloat16().to(z.dtype),
    "nearly cancels": lambda z: (z + 1e4) - 1e4,
    "the same for all": lambda z: 0.0 * z,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("learned", [False, True], ids=["constant", "bias"])
@pytest.mark.parametrize("offset", [0.0, 2000.0, 1e6])
@pytest.mark.parametrize("inner", ROUNDED.values(), ids=ROUNDED)
def test_rounding_of_large_outputs_is_neither_randomness_nor_coupling(
    inner: Callable[[Tensor], Tensor], offset: float, learned: bool, dtype: torch.dtype
) -> None:
    for n in (2, 8):
        model = Shifted(inner, offset, learned=learned).to(dtype)
        check_examples(Network(model), drawn(n, 4).to(dtype))
    model = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 300), nn.ReLU(), nn.Linear(300, 3)).to(dtype)
    with torch.no_grad():
        model[-1].weight.add_(offset)
    check_examples(Network(model), drawn(8, 4).to(dtype))


def test_values_of_a_chunk_are_compared_by_their_spread() -> None:
    network, x, y = Network(Shifted(ROUNDED["plain"], 2000.0)), drawn(20, 4), torch.zeros(20, 2)

    def outputs(flat: Tensor, x: Any, _: Tensor) -> Tensor:
        return network(flat, x)

    reference, rows = AutogradReference(network, outputs, x, y, 0, 20), RowBuilder(network, outputs, x, y)
    values, pieces = rows.form(x, y)  # type: ignore[misc]
    assert reference.agrees(values, pieces, 3e-3)
    assert not reference.agrees(values + 0.1, pieces, 3e-3)


class Squeezed(nn.Linear):
    dim: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, None].squeeze(*self.dim)


@pytest.mark.parametrize("outputs", [2, 1])
def test_a_network_that_squeezes_one_example_away_is_told_to_squeeze_the_last_dimension(outputs: int) -> None:
    model, y = Squeezed(4, outputs).double(), Y[:, :outputs]
    with pytest.raises(ModelError, match=r"squeeze\(\), .*: write squeeze\(-1\)"):
        nb.OutputJacobian(model, [(X, y)], "regression")
    model.dim = (-1,)
    assert nb.OutputJacobian(model, [(X, y)], "regression").dense().shape == (y.numel(), 5 * outputs)
