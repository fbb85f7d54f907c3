"""Losses that hide derivatives or couple examples are refused, and those that only look as if they did are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import nullbayes as nb
from nullbayes.errors import ModelError
from support.drawing import randn
from support.two_layers import D, X, Y, two


@pytest.mark.filterwarnings("ignore:The network fits its")  # as it does
@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, 1e-6), (torch.float32, 1e-7), (D, 1e-15), (D, 0.0)])
@pytest.mark.parametrize("norm", [lambda layer: layer, parametrizations.weight_norm], ids=["plain", "weight norm"])
def test_losses_near_zero_are_not_taken_for_coupled_examples(
    norm: Callable[[nn.Module], nn.Module], dtype: torch.dtype, left: float
) -> None:
    torch.manual_seed(0)
    hidden = norm(nn.Linear(4, 20)), nn.ReLU(), norm(nn.Linear(20, 20)), nn.ReLU()
    generator = torch.Generator().manual_seed(0)
    model, x = nn.Sequential(*hidden, nn.Linear(20, 3)).to(dtype), randn(60, 4, generator=generator).to(dtype)
    y = model(x).detach() + left * randn(60, 3, generator=generator).to(dtype)
    posterior = nb.LossProjectedPosterior(model, "regression", prior_precision=1.0)
    posterior.fit([(x[:30], y[:30]), (x[30:], y[30:])], 4, progress=False)
    assert "example by example" not in posterior.report.route


def test_a_loss_that_couples_examples_is_refused() -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    couple = {
        "distances": lambda o, t: (torch.cdist(o, o).mean(1) - t[:, 0]).square(),
        "contrast": lambda o, t: -(o @ t.T).log_softmax(1).diagonal(),
        "hardest": lambda o, t: (lo := (o - t).square().sum(1)) * (lo >= lo.median()),
        "two of many": lambda o, t: (lo := (o - t).square().sum(1)) * (1 + lo[2:3].sum() * (torch.arange(len(o)) == 3)),
    }
    for loss in couple.values():
        with pytest.raises(ModelError, match="influence each other"):
            nb.LossProjectedPosterior(model, loss).fit([(X, Y)], 4, progress=False)


HIDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one output": lambda o, t: (o[:, 0] - t[:, 0]) ** 2 + (o[:, 1].detach() - t[:, 1]) ** 2,
    "weights": lambda o, t: (o - t).square().sum(1) * (o - t).abs().sum(1).detach(),
    "a penalty": lambda o, t: (o - t).square().sum(1) + o.detach().exp().sum(1),
}
SHOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "absolute": lambda o, t: (o - t).abs().sum(1),
    "hinge": lambda o, t: (1 - o * t.sign()).relu().sum(1),
    "huber": lambda o, t: F.huber_loss(o, t, reduction="none").sum(1),
    "detached where nothing depends on it": lambda o, t: (o - t).square().sum(1) + t.sum(1).detach(),
    "tiny": lambda o, t: (o - t).square().sum(1) * 1e-20,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_a_loss_hides_from_autograd_is_refused(dtype: torch.dtype) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x)))).to(dtype)
    data = [(X.to(dtype), Y.to(dtype))]
    for loss in HIDING.values():
        with pytest.raises(ModelError, match=r"The losses change .* hidden by detach\(\)"):
            nb.LossJacobian(model, data, loss)
        nb.OutputJacobian(model, data, loss)  # which holds the outputs, whatever the loss
    for loss in SHOWN.values():
        assert nb.LossJacobian(model, data, loss).n_rows == len(X)


def test_a_loss_of_targets_only_is_refused() -> None:
    with pytest.raises(ModelError, match="look at the loss"):
        nb.LossJacobian(nn.Linear(4, 2).double(), [(X, Y)], lambda o, t: t.square().sum(1))
