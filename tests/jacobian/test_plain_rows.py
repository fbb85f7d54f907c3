"""Networks without a layer rule, or with operations that torch differentiates wrongly, fall back to a slower route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import ModelError
from nullbayes.jacobian import routes
from support.layer_table import randint, randn
from support.models import ATTENTION, CLASSIFICATION, Attention
from support.slow_answers import jacobian


class Gained(nn.Module):
    """A parameter that no rule knows, between a layer with positions and one without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.gain, self.head = nn.Linear(2, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, 2)
        return self.head((self.token(x) * self.gain).tanh().mean(1))


@pytest.mark.parametrize(("width", "route"), [(3, "vmap(jacrev)"), (4, "by layers (89% of the parameters)")])
def test_rows_by_layers_and_vmap_are_mixed_only_where_layers_cover_half_the_columns(width: int, route: str) -> None:
    model, x, y = Gained(width).double(), randn(5, 3, 2), randint(3, 5)  # 12 + 4, and 15 or 20 in the head
    rows = nb.OutputJacobian(model, [(x, y)])
    assert rows.route == route
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))


class Unbatchable(nn.Module):
    """Looks at a number, which vmap does not allow, and has a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * self.gain
        return h.tanh() if float(h.detach().abs().sum()) >= 0 else h


def test_a_network_that_vmap_does_not_support_has_rows() -> None:
    model, (x, y) = Unbatchable().double(), CLASSIFICATION.data()
    with torch.inference_mode():
        entries = nb.OutputJacobian(model, [(x, y)]).dense()
    torch.testing.assert_close(entries.clone(), jacobian(model, x).flatten(0, 1))


class Repeats(nn.Module):
    """Calls its layer as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        for _ in range(int(times[0])):
            x = self.layer(x).tanh()
        return x


@pytest.mark.parametrize("compared", [False, True])
def test_examples_that_call_layers_differently_are_taken_one_by_one(compared: bool) -> None:
    model, x = Repeats().double(), (randn(6, 4), torch.tensor([1, 1, 1, 1, 2, 2]))
    rows = nb.OutputJacobian(model, [(x, randint(3, 6))])
    rows._compared[:] = compared  # before, in chunks of another size
    assert rows.route.startswith("by layers")
    wanted = jacobian(model, tuple(part[4:] for part in x)).flatten(0, 1)
    torch.testing.assert_close(rows.block(16, 24).dense(), wanted)
    assert rows.route == "example by example"


class Shared(nn.Module):
    """Positions are the same for all examples; `fold` puts the examples where others have none."""

    def __init__(self, fold: str = "") -> None:
        super().__init__()
        self.fold, self.places, self.body = fold, nn.Embedding(3, 2), nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, 2)
        h = x + self.places(torch.arange(3, device=x.device)[None])
        if self.fold == "all in one":
            return self.head(self.body(h.flatten(0, 1)[None]).view(len(x), 3, 4).tanh().mean(1))
        if self.fold == "first":
            return self.head(self.body(h[None])[0].tanh().mean(1))
        return self.head(self.body(h).tanh().mean(1))


@pytest.mark.parametrize(
    ("fold", "route"), [("", "by layers (100%"), ("all in one", "vmap(jacrev)"), ("first", "vmap(jacrev)")]
)
def test_parameters_used_once_for_all_examples_have_the_right_rows(fold: str, route: str) -> None:
    torch.manual_seed(0)
    model, x = Shared(fold).double(), randn(5, 3, 2)
    rows = nb.OutputJacobian(model, [(x, torch.zeros(5, dtype=torch.long))])
    assert rows.route.startswith(route)
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))


class WrongForward(torch.autograd.Function):
    """Knows its derivative in reverse mode only; the other is off by a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 2 * tangent * ctx.saved_tensors[0].cos()


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(WrongForward.apply(self.body(x)))


def test_a_wrong_forward_mode_is_not_used() -> None:
    torch.manual_seed(0)
    model, (x, y) = Sine().double(), CLASSIFICATION.data()
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit([(x, y)], 2, progress=False)
    assert "predictions by rows" in posterior.report.route
    wanted = model(x) + torch.einsum("nop,sp->sno", jacobian(model, x), posterior.directions)
    torch.testing.assert_close(posterior.predict(x).samples, wanted)
    with pytest.raises(ModelError, match=r'torch has wrong for this network: use "recompute"'):
        nb.OutputJacobian(model, [(x, y)], storage="matrix_free")


def test_rows_that_vmap_computes_wrongly_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = Attention(3).double(), CLASSIFICATION.data(ATTENTION)
    right = routes.vmap

    def wrong(function: Any, **options: Any) -> Any:
        return lambda *args: 1.01 * right(function, **options)(*args)

    monkeypatch.setattr(routes, "vmap", wrong)
    rows = nb.OutputJacobian(model.eval(), [(x, y)])
    assert rows.route == "example by example"
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))


def test_forward_mode_that_is_wrong_is_not_used_after_loading(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (x, y) = Sine().double(), CLASSIFICATION.data()
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit([(x, y)], 2, progress=False)
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", model)
    torch.testing.assert_close(loaded.predict(x).samples, posterior.predict(x).samples)
