"""Rows by layers: each rule gives the derivatives, and what no rule can do goes the plain way."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drawing
import nullbayes as nb
import zoo
from models import ATTENTION, BATCHNORM, CLASSIFICATION, MLP, MODELS, Attention, Model, Slow, jacobian
from nullbayes.errors import ModelError
from nullbayes.jacobian import comparison, layers
from nullbayes.jacobian.kernels import differentiable_kernels, eager_parts, recurrent_kernels
from nullbayes.jacobian.layer_rules import RULES
from nullbayes.jacobian.network import Network
from nullbayes.linalg.pieces import OuterPiece


class Pooled(nn.Module):
    """A layer, what bends, and the mean over all positions."""

    def __init__(self, layer: nn.Module, channel: int = 1) -> None:
        super().__init__()
        self.layer, self.head, self.channel = layer, nn.LazyLinear(3), channel

    def forward(self, x: Tensor) -> Tensor:
        h = (self.layer(x) * 1.3).tanh()
        return self.head(h.movedim(self.channel, -1).flatten(1, -2).mean(1) if h.ndim > 2 else h)


def randn(*shape: int) -> Tensor:
    return drawing.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def randint(high: int, *shape: int) -> Tensor:
    return drawing.randint(high, shape, generator=torch.Generator().manual_seed(5))


LAYERS: dict[str, tuple[nn.Module, Tensor, int]] = {  # layer, inputs, dimension of the channels
    "linear": (nn.Linear(4, 3), randn(5, 4), 1),
    "linear, positions": (nn.Linear(4, 3), randn(5, 2, 6, 4), -1),
    "linear, no bias": (nn.Linear(4, 3, bias=False), randn(5, 2, 4), -1),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), randn(5, 2, 9), 1),
    "conv2d": (nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 0)), randn(5, 2, 6, 5), 1),
    "conv2d, one position": (nn.Conv2d(2, 3, (6, 5)), randn(5, 2, 6, 5), 1),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), randn(5, 4, 4, 5), 1),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, groups=4, dilation=2), randn(5, 4, 6, 5), 1),
    "conv2d, same": (nn.Conv2d(2, 3, (5, 3), padding="same", dilation=(1, 2)), randn(5, 2, 6, 5), 1),
    "conv2d, valid": (nn.Conv2d(2, 3, 3, padding="valid"), randn(5, 2, 6, 5), 1),
    "conv2d, circular": (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), randn(5, 2, 6, 5), 1),
    "conv2d, reflect": (nn.Conv2d(2, 3, (4, 3), padding="same", padding_mode="reflect"), randn(5, 2, 6, 5), 1),
    "conv3d": (nn.Conv3d(2, 3, (2, 3, 1), stride=(2, 1, 1), padding=1), randn(5, 2, 4, 5, 3), 1),
    "batchnorm1d": (nn.BatchNorm1d(4), randn(5, 4), 1),
    "batchnorm1d, positions": (nn.BatchNorm1d(4, eps=0.1), randn(5, 4, 3), 1),
    "batchnorm2d": (nn.BatchNorm2d(2), randn(5, 2, 3, 4), 1),
    "batchnorm3d": (nn.BatchNorm3d(2), randn(5, 2, 3, 2, 4), 1),
    "groupnorm": (nn.GroupNorm(2, 4, eps=0.1), randn(5, 4, 3, 2), 1),
    "layernorm": (nn.LayerNorm(4, eps=0.1), randn(5, 3, 4), -1),
    "layernorm, two dimensions": (nn.LayerNorm((3, 4)), randn(5, 2, 3, 4), -1),
    "layernorm, no bias": (nn.LayerNorm(4, bias=False), randn(5, 4), 1),
    "rmsnorm": (nn.RMSNorm(4, eps=0.1), randn(5, 3, 4), -1),
    "embedding": (nn.Embedding(6, 4), randint(6, 5, 7), -1),
    "embedding, one word": (nn.Embedding(6, 4), randint(6, 5), -1),
    "prelu": (nn.PReLU(), randn(5, 4), 1),
    "prelu, channels": (nn.PReLU(3), randn(5, 3, 4, 2), 1),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    layer, x, channel = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Pooled(copy.deepcopy(layer), channel).double()
        model(x)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                tensor.add_(torch.rand_like(tensor))
    return model.eval(), x, randint(3, 5)


@each_layer
def test_each_rule_gives_the_derivatives(name: str) -> None:
    model, x, y = build(name)
    rows = nb.OutputJacobian(model, [(x, y)])
    assert rows.route == "by layers (100% of the parameters)"
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))


@pytest.mark.parametrize("chosen", ["layer.weight", "layer.bias"])
@each_layer
def test_one_parameter_of_a_layer_alone(name: str, chosen: str) -> None:
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


@pytest.mark.parametrize("options", [{"padding_idx": 2}, {"sparse": True}], ids=str)
def test_how_an_embedding_was_trained_does_not_hide_its_derivatives(options: dict[str, Any]) -> None:
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


# --- when the plain way is taken --------------------------------------------------------------------------------------


class Gained(nn.Module):
    """A parameter that no rule knows, between a layer with positions and one without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.gain, self.head = nn.Linear(2, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, 2)
        return self.head((self.token(x) * self.gain).tanh().mean(1))


@pytest.mark.parametrize(("width", "route"), [(3, "vmap(jacrev)"), (4, "by layers (89% of the parameters)")])
def test_a_second_way_is_taken_only_where_half_the_columns_are_factors(width: int, route: str) -> None:
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


def test_a_network_that_vmap_does_not_know_has_rows() -> None:
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


# --- several threads, copies ------------------------------------------------------------------------------------------


def test_threads_share_a_network() -> None:
    model, x, y = build("conv2d")
    rows, wanted = nb.OutputJacobian(model, [(x, y)]), jacobian(model, x).flatten(0, 1)
    with ThreadPoolExecutor(4) as threads:
        for entries in threads.map(lambda _: rows.dense(), range(24)):
            torch.testing.assert_close(entries, wanted)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, of the first product in a thread
def test_threads_evaluate_a_network_each_at_its_own_parameters() -> None:
    network, (x, _) = Network(Slow().double()), CLASSIFICATION.data()
    flats = [network.theta * scale for scale in range(8)]
    wanted = [network(flat, x) for flat in flats]
    with ThreadPoolExecutor(4) as threads:
        torch.testing.assert_close(list(threads.map(lambda flat: network(flat, x), flats)), wanted)


def test_the_switches_of_torch_come_back_when_the_last_thread_is_done() -> None:
    first, second = differentiable_kernels(), differentiable_kernels()
    with first:
        second.__enter__()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_network_can_be_copied_and_pickled() -> None:
    network, (x, _) = Network(MLP.build()), CLASSIFICATION.data()
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert twin.lock is not network.lock
        torch.testing.assert_close(twin.outputs(x), network.outputs(x))


def test_a_network_with_switches_can_be_copied() -> None:
    network, x = Network(zoo.recurrent(nn.GRU)()), randn(3, 5, 3).float()
    torch.testing.assert_close(copy.deepcopy(network).outputs(x), network.outputs(x))


def test_switches_are_put_back_by_the_last_who_needs_them() -> None:
    assert torch.backends.mkldnn.enabled
    with recurrent_kernels():
        with recurrent_kernels():
            assert not torch.backends.mkldnn.enabled
            assert not torch.backends.cudnn.enabled
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled
    for switches in (recurrent_kernels, eager_parts):
        assert copy.deepcopy(switches) is switches
        assert pickle.loads(pickle.dumps(switches)) is switches


def test_all_outputs_in_one_backward_pass() -> None:
    model, (x, _) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM)
    tensors = [x.clone().requires_grad_()]
    for layer in model:
        tensors.append(layer(tensors[-1].clone()))
    values, unused = tensors.pop().sum(0), randn(2, 3).requires_grad_()
    one_by_one = [comparison.gradients(value, [*tensors, unused]) for value in values]
    at_once = layers._gradients_at_once(values, [*tensors, unused])
    assert not at_once[-1].any()
    torch.testing.assert_close(at_once, [torch.stack(parts) for parts in zip(*one_by_one, strict=True)])


@pytest.mark.parametrize("case", [case for case in MODELS if case.route == "plain"], ids=lambda case: case.name)
def test_the_plain_way_counts_its_rows_thrice_and_what_it_saves(case: Model) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    rows = nb.OutputJacobian(model, [(x, y)])
    entries = 3 * rows.n_columns * 8  # three outputs, in float64
    assert rows._layers.example_bytes > 3 * entries
    assert nb.LossJacobian(model, [(x, y)])._layers.example_bytes < rows._layers.example_bytes


def test_rows_are_formed_in_chunks_of_even_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, n=7)
    rows, sizes = nb.OutputJacobian(model, [(x, y)]), []
    form = layers.LayerRows.form
    monkeypatch.setattr(layers.LayerRows, "form", lambda self, x, y: sizes.append(len(y)) or form(self, x, y))
    rows.working_bytes = 6 * rows._layers.example_bytes  # six would fit, and leave one
    rows.keep()
    assert sizes == [4, 3]


@pytest.mark.parametrize(("storage", "share", "n_chunks"), [("device", 1, 2), ("half", 2, 3), ("form", 4, 7)])
def test_chunks_are_counted_as_they_are_formed(
    storage: str, share: int, n_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, n=7)
    rows, sizes = nb.OutputJacobian(model, [(x, y)]), []
    working = rows.working_bytes = 6 * rows._layers.example_bytes
    assert rows.forming_chunks(storage, working) == n_chunks
    form = layers.LayerRows.form
    monkeypatch.setattr(layers.LayerRows, "form", lambda self, x, y: sizes.append(len(y)) or form(self, x, y))
    rows._form(0, 7, working // share)
    assert len(sizes) == n_chunks


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
def test_what_all_examples_share_has_rows_of_its_own(fold: str, route: str) -> None:
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


def test_forward_mode_that_is_wrong_is_not_used() -> None:
    torch.manual_seed(0)
    model, (x, y) = Sine().double(), CLASSIFICATION.data()
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit([(x, y)], 2, progress=False)
    assert "predictions by rows" in posterior.report.route
    wanted = model(x) + torch.einsum("nop,sp->sno", jacobian(model, x), posterior.directions)
    torch.testing.assert_close(posterior.predict(x).samples, wanted)
    with pytest.raises(ModelError, match=r'torch has wrong for this network: use "form"'):
        nb.OutputJacobian(model, [(x, y)], storage="products")


def test_rows_that_vmap_has_wrong_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = Attention(3).double(), CLASSIFICATION.data(ATTENTION)
    right = layers.vmap

    def wrong(function: Any, **options: Any) -> Any:
        return lambda *args: 1.01 * right(function, **options)(*args)

    monkeypatch.setattr(layers, "vmap", wrong)
    rows = nb.OutputJacobian(model.eval(), [(x, y)])
    assert rows.route == "example by example"
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))
