"""Networks that hide something: derivatives, parameters, a branch that only later examples take, each other's examples.

What cannot be varied or differentiated is refused by name; what plain differentiation sees otherwise goes by it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import nullbayes as nb
from drawing import randn
from nullbayes.errors import DataError, FileError, ModelError
from zoo import Wired

D = torch.float64
X, Y = (randn(9, width, generator=torch.Generator().manual_seed(width), dtype=D) for width in (4, 2))
X[:3, 0] = torch.tensor([-1.0, 0.0, 1.0])  # in order, and none of them beyond 1
X[3:, 0] = torch.tensor([0.5, -0.5, -2.0, 3.0, 2.0, 4.0])


def two(forward: Callable[..., Tensor], **more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Wired(forward, a=nn.Linear(4, 30), h=nn.Linear(30, 2), **more).double()


def fit(model: nn.Module, x: Any = X, y: Tensor = Y, **options: Any) -> Any:
    return nb.ProjectedPosterior(model, "regression", prior_precision=1.0, **options).fit([(x, y)], 8, progress=False)


def slow_rows(model: nn.Module, x: Tensor) -> Tensor:
    """One call of autograd for each output of each example; the model may be one that cannot be copied."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = [torch.autograd.grad(value, parameters, retain_graph=True) for value in model(x).flatten()]
    return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in found])


# --- what only later examples show ------------------------------------------------------------------------------------


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


def padded(self: Any, x: Tensor) -> Tensor:
    return self.h(F.embedding((x[:, :3] > 1.5).long(), self.words.weight, padding_idx=1).sum(1) + self.a(x))


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
def test_rows_are_right_beyond_the_first_examples(make: Callable[[], nn.Module]) -> None:
    model = make()
    rows = nb.OutputJacobian(model, [(X, Y)], "regression")
    torch.testing.assert_close(rows.dense(), slow_rows(model, X))
    posterior = fit(model)
    assert (posterior.predict(X).samples - model(X).detach()).abs().max() < 1e-6


def test_a_route_may_change_while_rows_are_formed() -> None:
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
    posterior = fit(make())
    fresh, new = copy.deepcopy(posterior), randn(5, 4, generator=torch.Generator().manual_seed(7), dtype=D) * 2
    wanted = fresh.predict(new).samples
    posterior.predict(new[:1])
    torch.testing.assert_close(posterior.predict(new).samples, wanted)


def test_what_all_examples_share_keeps_its_value() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.a(x))) * self.b(torch.ones(1, 3, dtype=D, device=x.device)).sum()

    model = two(forward, b=nn.Linear(3, 2))
    posterior = fit(model)
    posterior.predict(X[:1])
    torch.testing.assert_close(posterior.predict(X).samples.mean(0), model(X).detach(), rtol=0, atol=1e-6)


def test_inputs_of_other_shapes_are_predicted_after_each_other() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:  # (n, T, 4) -> (n, T)
        return self.gain.weight[0, 0] * self.h(torch.tanh(self.a(x)))[..., 0]

    model = two(forward, gain=nn.Linear(1, 1, bias=False))
    posterior = fit(model, X[:, None].expand(-1, 3, -1).clone(), Y[:, :1].expand(-1, 3).clone())
    for length in (1, 5, 2):
        assert posterior.predict(X[:4, None].expand(-1, length, -1)).mean.shape == (4, length)


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
def test_what_is_hidden_from_derivatives_is_refused(
    make: Callable[[], nn.Module], fragment: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ModelError, match=fragment):
        fit(make().to(dtype), X.to(dtype), Y.to(dtype))


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


def test_steps_that_turn_a_network_over_are_no_evidence() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        layers = nn.Linear(4, 32), nn.LayerNorm(32, eps=1e-12), nn.ReLU(), nn.Linear(32, 2)
        with torch.no_grad():
            layers[0].weight *= 1e-5
            layers[0].bias *= 1e-5
        assert fit(Single(*layers), X.float(), Y.float()).report.converged


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [dead, narrow])
def test_kinks_and_steep_networks_are_not_taken_for_hidden(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    assert fit(make().to(dtype), X.to(dtype), Y.to(dtype)).report.converged


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, 1e-6), (torch.float32, 1e-7), (D, 1e-15), (D, 0.0)])
@pytest.mark.parametrize("norm", [lambda layer: layer, parametrizations.weight_norm], ids=["plain", "weight norm"])
def test_losses_near_zero_are_not_taken_for_coupled(
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
    }
    for loss in couple.values():
        with pytest.raises(ModelError, match="influence each other"):
            nb.LossProjectedPosterior(model, loss).fit([(X, Y)], 4, progress=False)


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


def test_weights_that_change_with_the_mode_are_put_back_and_refused() -> None:
    model = nn.Sequential(Merging(), nn.Tanh(), nn.Linear(6, 2)).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match=r"'0.weight' changes when .* call model.eval\(\) before"):
        nb.ProjectedPosterior(model, "regression")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.eval()
    assert (fit(model).predict(X).mean - model(X).detach()).abs().max() < 1e-6


# --- what is left alone -----------------------------------------------------------------------------------------------


def test_buffers_that_the_forward_pass_writes_are_the_copys() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.h(torch.tanh(self.a(x)))

    model = two(forward)
    model.register_buffer("calls", torch.tensor(0))
    fit(model).predict(X)
    assert int(model.calls) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [False, True])
def test_what_a_model_keeps_of_its_last_call_does_not_hinder_a_copy(norm: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.a(x))
        return self.h(self.drop(self.last))

    model = two(forward, drop=nn.Dropout(0.5))
    if norm:
        model.a = nn.utils.weight_norm(model.a)
    model.eval()(X)
    posterior = fit(model)
    wanted = posterior.predict(X).mean
    model.train()
    torch.testing.assert_close(posterior.predict(X).mean, wanted)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_parametrizations_of_convolutions_have_rows() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 2, 1)), nn.Flatten()).double()
    x, y = (randn(5, *shape, generator=torch.Generator().manual_seed(1), dtype=D) for shape in ((4, 3), (6,)))
    rows = nb.OutputJacobian(model, [(x, y)], "regression")
    torch.testing.assert_close(rows.dense(), slow_rows(model, x))


def test_inputs_may_be_worked_on_in_place_and_stay_as_they_were() -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x.sub_(0.5)))))
    x = X.clone()
    posterior = fit(model, x)
    posterior.predict(x)
    assert torch.equal(x, X)
    torch.testing.assert_close(posterior.predict(x).mean, model(X.clone()).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_outputs_in_another_precision_are_taken_back(dtype: torch.dtype) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))).to(dtype)).float()
    posterior = fit(model, X.float(), Y.float())
    assert posterior.predict(X.float()).samples.dtype == torch.float32


def test_padding_is_no_matter_of_the_route() -> None:
    model = two(padded, words=nn.Embedding(2, 30))
    with pytest.raises(ModelError, match="hidden by detach"):  # F.embedding leaves out the derivative of the padding
        fit(model, X + 2)


def test_a_wrong_input_does_not_turn_forward_mode_off() -> None:
    posterior = fit(two(lambda self, x: self.h(torch.tanh(self.a(x)))))
    assert posterior._network.forward_mode
    with pytest.raises(RuntimeError):
        posterior.predict(X[:, :3])
    assert posterior._network.forward_mode


# --- files and data ---------------------------------------------------------------------------------------------------


def test_other_data_of_the_same_size_are_not_taken_for_the_first(tmp_path: Any) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    fit(model).save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", model)
    with pytest.raises(DataError, match="other data than the posterior was fitted to"):
        loaded.prepare([(X + 1, Y)])
    loaded.prepare([(X[:4], Y[:4]), (X[4:], Y[4:])]).extend(2)


def test_a_posterior_is_loaded_as_it_was_fitted(tmp_path: Any) -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    fit(model, y=Y[:, :1], output_fn=lambda o: o[:, :1]).save(tmp_path / "file")
    with pytest.raises(FileError, match="fitted with an output_fn of your own"):
        nb.load(tmp_path / "file", model)
    nb.load(tmp_path / "file", model, output_fn=lambda o: o[:, :1])
    fit(model).save(tmp_path / "file")
    with pytest.raises(FileError, match="fitted without an output_fn"):
        nb.load(tmp_path / "file", model, output_fn=lambda o: o[:, :1])
    with pytest.raises(FileError, match="with a regression likelihood, not with classification"):
        nb.load(tmp_path / "file", model, likelihood="classification")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_labels_do_not_wrap_around(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1, 100, 3, 126, 5, 6, 7, 9 if dtype == torch.int8 else 156])
    model = nn.Linear(4, 160).double()
    rows = [nb.OutputJacobian(model, [(X, y)]) for y in (labels, labels.to(dtype))]
    assert rows[0].n_counted == rows[1].n_counted == 9 * 160
    assert [r.likelihood.ignore_index for r in rows] == [-100, -100]


def test_products_need_forward_mode() -> None:
    model = two(lambda self, x: self.h(self.words((x > 0).long())), words=nn.EmbeddingBag(2, 30))
    with pytest.raises(ModelError, match=r"needs forward mode, which this network has not"):
        nb.OutputJacobian(model, [(X, Y)], "regression", storage="products")


def test_integer_parameters_cannot_vary() -> None:
    model = two(lambda self, x: self.h(torch.tanh(self.a(x))))
    model.count = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    with pytest.raises(ModelError, match="Only floating-point parameters can vary"):
        nb.ProjectedPosterior(model, parameters="count")
    assert fit(model).report.n_parameters == 4 * 30 + 30 + 60 + 2


@pytest.mark.parametrize("name", ["forward", "training", "a.", "", "w.b"])
def test_names_that_a_module_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="choose others"):
        nb.as_module(lambda p, x: x, {"w": torch.ones(2), name: torch.ones(2)})


def test_a_number_of_samples_is_an_integer() -> None:
    with pytest.raises(nb.errors.SettingsError, match="at least 2"):
        nb.ProjectedPosterior(nn.Linear(4, 2).double(), "regression").fit([(X, Y)], 3.0)  # type: ignore[arg-type]


def test_a_narrow_label_is_not_one_to_be_ignored() -> None:
    likelihood = nb.likelihoods.Classification(ignore_index=-1)
    with pytest.raises(nb.errors.LikelihoodError, match="from 0 to 255"):
        likelihood.check(torch.zeros(2, 160, dtype=D), torch.tensor([0, 255], dtype=torch.uint8))
