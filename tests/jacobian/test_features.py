"""The last layer of a network is found, and its inputs are read without a trace in the user's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.features import OUTPUTS, FeatureReader, find_last_layer
from nullbayes.jacobian.network import Network
from nullbayes.precision import full_precision
from support import zoo
from support.compatibility_case import Case, call
from support.compatibility_table import CASES
from support.drawing import randn
from support.models import MODELS

D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def hooks(model: nn.Module) -> int:
    """How many hooks there are anywhere in a model."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def inputs_of(model: nn.Module, layer: str, x: Any) -> Tensor:
    """What goes into a layer of a model, by a hook of the test's own."""
    seen: list[Tensor] = []
    part = model.get_submodule(layer)
    handle = part.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    with torch.no_grad():
        call(model, x)
    handle.remove()
    return seen[-1].clone()


# --- the last layer ---------------------------------------------------------------------------------------------------

LAST = {  # and whether the outputs are what it returns
    "mlp": ("2", True),
    "one layer": ("", True),
    "cnn": ("5", True),
    "batchnorm": ("8", True),
    "called twice": ("head", True),
    "weight used elsewhere": ("head", True),
    "named inputs": ("head", True),
    "two inputs": ("head", True),
    "sequences": ("head", True),
    "keyword calls": ("head", True),
    "residual": ("head", True),
    "attention": ("head", True),
}


@pytest.mark.parametrize("name", LAST)
def test_last_layer_of_many_networks_is_found_and_gives_the_outputs(name: str) -> None:
    model, x = MODELS[name].build(), MODELS[name].inputs(9, torch.Generator().manual_seed(1))
    network = Network(model)
    layer, is_output = find_last_layer(network, x)
    assert (layer, is_output) == LAST[name]
    reader = FeatureReader(network, layer)
    seen, head = reader(x), reader.head()
    torch.testing.assert_close(seen.outputs, network.outputs(x), rtol=0, atol=0)
    torch.testing.assert_close(seen.features, inputs_of(model, layer, x))
    torch.testing.assert_close(head(seen.features), seen.outputs)
    last = model.get_submodule(layer)
    torch.testing.assert_close(head.weight, last.weight.detach())
    torch.testing.assert_close(head.bias, last.bias.detach())
    assert hooks(model) == hooks(network.module) == 0


USED = {
    "one output (N,)": ("head", True),
    "ModelOutput or dict with logits": ("head", True),
    "LSTM": ("head", True),
    "LSTM, two layers, both directions": ("head", True),
    "GRU": ("head", True),
    "TransformerEncoder": ("head", True),
    "MultiheadAttention": ("head", True),
    "ResNet": ("5", True),
    "tied weights": ("decoder", True),
    "BERT classifier": ("classifier", True),
    "BERT token classifier with ignore_index": ("classifier", True),
    "GPT-2 with tied embeddings": ("language.lm_head", False),  # the last position is cut off afterwards
    "segmentation (N, C, H, W)": ("out", True),
    "sequences (N, T, C) with ignore_index": ("3", True),
    "bfloat16": ("5", True),
    "float16": ("2", True),
    "torch.compile": ("2", True),
    "torch.compile of a part": ("2", True),
    "DataParallel": ("2", True),
    "LoRA-like adapters": ("2.base", False),
    "mixture of experts": ("gate", False),  # an expert sees some of the examples only
    "plain function with a dict of parameters": (OUTPUTS, False),
}
CASE = {case.name: case for case in CASES}


@full_precision()
@pytest.mark.parametrize("case", [CASE[name] for name in USED], ids=lambda case: case.name)
def test_features_of_networks_in_use(case: Case) -> None:
    """Without a hook of ours left, and in float32 where the network is in half precision."""
    if case.needs:
        pytest.importorskip(case.needs)
    model = case.wrap(case.build())
    network, x = Network(model, output_fn=case.options.get("output_fn")), case.data(9, 3)[0]
    layer, is_output = find_last_layer(network, x)
    assert (layer, is_output) == USED[case.name]
    reader = FeatureReader(network, layer)
    seen = reader(x)
    assert len(seen.features) == 9
    assert seen.features.ndim == 2
    assert seen.features.dtype == seen.outputs.dtype == network.dtype == torch.promote_types(case.dtype, torch.float32)
    torch.testing.assert_close(seen.outputs, network.outputs(x), rtol=0, atol=0)
    assert hooks(model) == 0
    if layer == OUTPUTS:
        torch.testing.assert_close(seen.features, seen.outputs)
        assert reader.head() is None
        return
    given = inputs_of(network.model.to(network.dtype), layer, _as(x, network.dtype))
    if is_output and given.ndim == 2:
        torch.testing.assert_close(seen.features, given)
        torch.testing.assert_close(reader.head()(seen.features), seen.outputs)


def _as(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {key: _as(value, dtype) for key, value in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


def wired(forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return zoo.Wired(forward, **parts).double()


def test_a_layer_that_is_called_twice_is_not_the_last_one() -> None:
    model = wired(lambda self, x: self.again(self.again(self.first(x))), first=nn.Linear(4, 3), again=nn.Linear(3, 3))
    assert find_last_layer(Network(model), draw(5, 4)) == ("first", False)


def test_a_network_whose_only_layer_is_called_twice_has_its_outputs_as_features() -> None:
    model = wired(lambda self, x: self.again(self.again(x)), again=nn.Linear(3, 3))
    assert find_last_layer(Network(model), draw(5, 3)) == (OUTPUTS, False)


@pytest.mark.parametrize("change", [lambda f: f / 2, lambda f: f.mul_(0.5)], ids=["scaled", "in place"])
def test_a_layer_whose_outputs_are_changed_afterwards_does_not_return_those_of_the_network(change: Any) -> None:
    model = wired(lambda self, x: change(self.head(x)), head=nn.Linear(4, 3))
    assert find_last_layer(Network(model), draw(5, 4)) == ("head", False)


def test_a_layer_beside_the_last_one_that_is_called_after_it_is_not_taken() -> None:
    model = wired(
        lambda self, x: {"logits": self.head(x), "other": self.other(x)}, head=nn.Linear(4, 3), other=nn.Linear(4, 3)
    )
    assert find_last_layer(Network(model), draw(5, 4)) == ("head", True)


def test_a_layer_that_only_some_examples_reach_is_not_taken_if_the_first_ones_do() -> None:
    model = zoo.Experts().double()
    x = draw(7, 4)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[:2, 0] = torch.tensor([1.0, -1.0])
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    assert find_last_layer(Network(model), x) == ("gate", False)


class _Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class _ByName(nn.Linear):
    def forward(self, kind: str, *, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_layers_that_take_and_return_something_else_than_a_tensor_do_not_stop_a_fit() -> None:
    pair = wired(lambda self, x: self.head(self.first(x))[0], first=nn.Linear(4, 5), head=_Pair(5, 3))
    assert find_last_layer(Network(pair), draw(5, 4)) == ("head", False)
    by_name = wired(lambda self, x: self.head("all", x=self.first(x)), first=nn.Linear(4, 5), head=_ByName(5, 3))
    assert find_last_layer(Network(by_name), draw(5, 4)) == ("first", False)
    for model in (pair, by_name):
        posterior = nb.baselines.MAP(model).fit(draw(50, 4), draw(50, 3).argmax(1))
        assert posterior.calibrate(draw(60, 4, seed=1), kind="combined").p_value(draw(2, 4)).shape == (2,)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_features_of_several_positions_are_their_mean() -> None:
    case = CASE["segmentation (N, C, H, W)"]
    model, x = case.build(), case.data(4, 1)[0]
    reader = FeatureReader(Network(model), "out")
    given = inputs_of(model, "out", x)  # (n, 4, 4, 4)
    torch.testing.assert_close(reader(x).features, given.mean((2, 3)))
    assert reader.head() is None  # a convolution
    tagger = wired(lambda self, x: self.head(x), head=nn.Linear(3, 2))
    x = draw(4, 5, 3)
    torch.testing.assert_close(FeatureReader(Network(tagger), "head")(x).features, x.mean(1))
    x = draw(4, 5, 6, 3)  # as in Swin transformers, channels last
    torch.testing.assert_close(FeatureReader(Network(tagger), "head")(x).features, x.mean((1, 2)))


@pytest.mark.parametrize("layer", ["1", "2", "3"])
def test_channels_of_images_stay_apart_in_front_of_any_layer(layer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).double()
    x = draw(4, 2, 4, 6)
    given = inputs_of(model.eval(), layer, x)
    assert given.shape == (4, 3, 2, 4)
    torch.testing.assert_close(FeatureReader(Network(model), layer)(x).features, given.mean((2, 3)))


def test_padding_does_not_change_features() -> None:
    model = wired(
        lambda self, ids, attention_mask: self.head(self.words(ids)), words=nn.Embedding(7, 4), head=nn.Linear(4, 3)
    )
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    reader = FeatureReader(Network(model), "head")
    short = reader({"ids": ids, "attention_mask": torch.ones_like(ids)}).features
    torch.testing.assert_close(short, model.words(ids).mean(1).detach())
    long = nn.functional.pad(ids, (0, 4))
    for mask in (long != 0, (long != 0).long(), (long != 0).double()):
        torch.testing.assert_close(reader({"ids": long, "attention_mask": mask}).features, short)
    assert not torch.allclose(reader({"ids": long, "attention_mask": torch.ones_like(long)}).features, short)
    nothing = reader({"ids": long, "attention_mask": torch.zeros_like(long)}).features
    torch.testing.assert_close(nothing, torch.zeros_like(short))


def test_features_that_the_network_changes_afterwards_are_as_the_layer_was_given_them() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.body(x)
        out = self.head(h)
        h.zero_()
        return out

    model, x = wired(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3)), draw(6, 4)
    features = FeatureReader(Network(model), "head")(x).features
    torch.testing.assert_close(features, model.body(x).detach())


def test_training_examples_are_read_once_each_in_their_order() -> None:
    model = MODELS["mlp"].build()
    network, x, y = Network(model), draw(600, 4), torch.arange(600) % 3
    data = [(x[:250], y[:250]), (x[250:], y[250:])]
    examples = Examples(data, None, network.device)
    reader = FeatureReader(network, "2")
    parts = list(reader.all(examples))
    wanted = model[:2](x).detach()
    torch.testing.assert_close(torch.cat([seen.features for seen, _ in parts]), wanted)
    assert torch.equal(torch.cat([targets for _, targets in parts]), y)
    numbers = [0, 3, 249, 250, 599]
    torch.testing.assert_close(reader.some(examples.some(numbers), 2), wanted[numbers])


# --- what is refused, and what is left --------------------------------------------------------------------------------


def test_a_wrong_name_is_refused_with_the_way_to_find_the_right_one() -> None:
    with pytest.raises(SettingsError, match=r"no layer 'head': look at \[name for name, _ in model.named_modules"):
        FeatureReader(Network(MODELS["mlp"].build()), "head")


@pytest.mark.parametrize(
    ("layer", "given"),
    [("again", r"\(5, 4\), \(5, 4\)"), ("unused", "no tensor"), ("words", "no tensor"), ("flat", r"\(20, 4\)")],
)
def test_a_layer_without_one_input_per_example_is_refused(layer: str, given: str) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h = self.words(ids)
        h = self.flat(h.flatten(0, 1)).view_as(h).mean(1)
        return self.head(self.again(self.again(h)))

    parts = {name: nn.Linear(4, 4) for name in ("flat", "again", "unused", "head")}
    reader = FeatureReader(Network(wired(forward, words=nn.Embedding(7, 4), **parts)), layer)
    with pytest.raises(ModelError, match=rf"'{layer}' was given {given} when .* 5 examples.*name another layer"):
        reader(torch.arange(20).view(5, 4) % 7)


class Stubborn(nn.Sequential):
    """Cannot be copied, so that hooks are put into the user's own."""

    def __deepcopy__(self, memo: Any) -> Any:
        msg = "no copies"
        raise TypeError(msg)


@pytest.mark.parametrize("kind", [nn.Sequential, Stubborn])
def test_no_hook_is_left_after_an_error(kind: type) -> None:
    model = kind(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    network = Network(model)
    assert (network.module is model) == (kind is Stubborn)
    bad = draw(3, 7)
    with pytest.raises(RuntimeError):
        find_last_layer(network, bad)
    with pytest.raises(RuntimeError):
        FeatureReader(network, "2")(bad)
    assert hooks(model) == hooks(network.module) == 0
    assert find_last_layer(network, draw(3, 4)) == ("2", True)
    assert hooks(model) == hooks(network.module) == 0


def test_a_head_without_a_bias_has_zeros() -> None:
    model = wired(lambda self, x: self.head(x), head=nn.Linear(4, 3, bias=False))
    reader, x = FeatureReader(Network(model), "head"), draw(5, 4)
    assert torch.equal(reader.head().bias, torch.zeros(3, dtype=D))
    torch.testing.assert_close(reader.head()(x), model(x).detach())


def test_outputs_with_several_dimensions_are_flat_where_they_are_the_features() -> None:
    model = nb.as_module(lambda p, x: x[:, None] * p["w"][:, None], {"w": torch.ones(2, dtype=D)})
    seen = FeatureReader(Network(model), OUTPUTS)(draw(5, 3))
    assert seen.outputs.shape == (5, 2, 3)
    torch.testing.assert_close(seen.features, seen.outputs.flatten(1))
