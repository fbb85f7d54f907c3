"""Routes to rows are tried in order, and each one that is not taken has a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from drawing import randn
from nullbayes.errors import InputError
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.routes import Attempts
from nullbayes.jacobian.row_builder import RowBuilder


def failing(text: str) -> Callable[[], str]:
    def way() -> str:
        raise RuntimeError(text)

    return way


def test_first_way_that_works_is_taken_and_the_others_have_a_reason() -> None:
    attempts, calls = Attempts(), list[str]()
    ways = {"one": failing("cannot\nbecause"), "two": lambda: calls.append("two") or "two", "three": lambda: "three"}
    assert attempts.first(ways) == "two"
    assert attempts.reasons == {"one": "cannot"}
    ways["one"] = lambda: "one"
    assert attempts.first(ways) == "two"  # which has failed once is not tried again
    assert len(calls) == 2


def test_nothing_is_remembered_where_every_way_fails() -> None:
    attempts = Attempts()
    with pytest.raises(RuntimeError, match="second"):
        attempts.first({"one": failing("first"), "two": failing("second")})
    assert attempts.reasons == {}


def test_running_out_of_memory_is_no_reason() -> None:
    attempts = Attempts()
    with pytest.raises(RuntimeError, match="out of memory"):
        attempts.first({"one": failing("CUDA out of memory"), "two": lambda: "two"})
    assert attempts.reasons == {}


class Gain(nn.Module):
    """Has no layer that a rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.gain


def test_wrong_input_does_not_change_the_route() -> None:
    network = Network(Gain().double())
    x = randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    builder = RowBuilder(network, lambda flat, x, y: network(flat, x), x, torch.zeros(5))
    assert builder.route == "vmap(jacrev)"
    reasons = dict(builder.reasons)
    assert list(reasons) == ["by layers"]
    network.input_signature = "inputs of shape (n, 4) and type torch.float64"
    with pytest.raises(InputError, match="in training it had"):
        builder.pieces(x[:, :3], torch.zeros(5))
    assert builder.route == "vmap(jacrev)"
    assert builder.reasons == reasons
