"""Networks that hide derivatives, parameters or the influence of other examples are refused, with their names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import nullbayes as nb
from nullbayes.errors import ModelError
from nullbayes.jacobian.checks import AutogradReference, check_examples
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.row_builder import RowBuilder
from support.drawing import randn
from support.two_layers import D, X, Y, fit_two_layers, two

# --- what is refused --------------------------------------------------------------------------------------------------


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


HIDDEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
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
    for loss in HIDDEN.values():
        with pytest.raises(ModelError, match=r"The losses change .* hidden by detach\(\)"):
            nb.LossJacobian(model, data, loss)
        nb.OutputJacobian(model, data, loss)  # which holds the outputs, whatever the loss
    for loss in SHOWN.values():
        assert nb.LossJacobian(model, data, loss).n_rows == len(X)


def test_a_loss_of_targets_only_is_refused() -> None:
    with pytest.raises(ModelError, match="look at the loss"):
        nb.LossJacobian(nn.Linear(4, 2).double(), [(X, Y)], lambda o, t: t.square().sum(1))


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


def padded(self: Any, x: Tensor) -> Tensor:
    return self.h(F.embedding((x[:, :3] > 1.5).long(), self.words.weight, padding_idx=1).sum(1) + self.a(x))


def test_padding_hidden_from_autograd_is_refused_by_every_route() -> None:
    model = two(padded, words=nn.Embedding(2, 30))
    with pytest.raises(ModelError, match="hidden by detach"):  # F.embedding leaves out the derivative of the padding
        fit_two_layers(model, X + 2)


# --- an offset that all examples share hides neither randomness nor coupling ------------------------------------------


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
