"""Linearized outputs are the same by rows and by forward mode, and there is a way for every network."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import ModelError
from nullbayes.jacobian import products
from nullbayes.jacobian.batches import map_leaves
from nullbayes.jacobian.network import Network
from support.cube import Cube
from support.drawing import randn
from support.models import CLASSIFICATION, MODELS, Model, Slow, call
from support.slow_answers import jacobian

each_model = pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
TOLERANCE = {torch.float64: {}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}
FEW, MANY = 4, 5  # vectors: with three outputs, forward mode is less work up to four


def vectors_for(network: Network, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return randn(n, network.n_parameters, generator=generator, dtype=torch.float64).to(dtype)


def converted(x: Any, dtype: torch.dtype) -> Any:
    return map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_model
def test_rows_and_forward_mode_agree(case: Model, dtype: torch.dtype) -> None:
    network, (x, _) = Network(case.build().to(dtype)), CLASSIFICATION.data(case, n=7)
    x, vectors = converted(x, dtype), vectors_for(network, MANY, dtype)
    outputs, changes = products.linearized(network, x, vectors)
    wanted, ahead = products._linearized_by_products(network, x, vectors)
    torch.testing.assert_close(outputs, wanted)
    torch.testing.assert_close(changes, ahead, **TOLERANCE[dtype])
    assert not outputs.requires_grad
    assert not changes.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_model
def test_output_rows_of_every_network(case: Model, dtype: torch.dtype) -> None:
    model, (x, _) = case.build(), CLASSIFICATION.data(case)
    entries = products.output_rows(Network(case.build().to(dtype)), converted(x, dtype))
    torch.testing.assert_close(entries.double(), jacobian(model, x), **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "n_vectors", "cheaper"),
    [("batchnorm", MANY, True), ("batchnorm", FEW, False), ("residual", 50, False)],
    ids=["fewer outputs than vectors", "hardly fewer", "not wholly by layers"],
)
def test_rows_are_formed_where_that_is_less_work_than_forward_mode(name: str, n_vectors: int, cheaper: bool) -> None:
    case = MODELS[name]
    network, (x, _) = Network(case.build()), CLASSIFICATION.data(case)
    assert products._rows_are_cheaper(network, x, n_vectors) is cheaper


def test_rows_that_do_not_fit_in_memory_are_not_formed() -> None:
    case = MODELS["batchnorm"]
    network, (x, _) = Network(case.build()), CLASSIFICATION.data(case)
    assert products._rows_are_cheaper(network, x, MANY)
    products._layer_rows(network, x).working_bytes = 1000
    assert not products._rows_are_cheaper(network, x, MANY)


@pytest.mark.parametrize(("n_vectors", "sizes"), [(FEW, {3, 1}), (MANY, {2, 1})], ids=["products", "rows"])
def test_the_result_does_not_depend_on_the_chunk_size(
    n_vectors: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MODELS["batchnorm"]
    network, (x, _) = Network(case.build()), CLASSIFICATION.data(case, n=7)
    vectors = vectors_for(network, n_vectors)
    whole, entries = products.linearized(network, x, vectors), products.output_rows(network, x)
    rows, cut, seen = products._layer_rows(network, x), products._in_pieces, list[int]()
    rows.working_bytes = 2 * rows.example_bytes

    def watched(x: Any, size: int) -> Any:
        for piece in cut(x, size):
            seen.append(len(piece))
            yield piece

    monkeypatch.setattr(products, "_in_pieces", watched)
    monkeypatch.setattr(products, "product_examples", lambda device, n: 3)
    torch.testing.assert_close(products.linearized(network, x, vectors), whole)
    assert set(seen) == sizes
    seen.clear()
    torch.testing.assert_close(products.output_rows(network, x), entries)
    assert seen == [2, 2, 2, 1]


class BackwardOnly(nn.Module):
    def __init__(self, *, gain: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(5)) if gain else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Cube.apply(self.first(x)) * self.gain)


@pytest.mark.parametrize("n_vectors", [FEW, MANY])
@pytest.mark.parametrize("gain", [False, True], ids=["by layers", "with a rest"])
def test_a_network_without_forward_mode_can_predict(gain: bool, n_vectors: int) -> None:
    model, (x, _) = BackwardOnly(gain=gain).double(), CLASSIFICATION.data()
    network = Network(model)
    vectors = vectors_for(network, n_vectors)
    outputs, changes = products.linearized(network, x, vectors)
    torch.testing.assert_close(outputs, call(model, x).detach())
    torch.testing.assert_close(changes, torch.einsum("nop,sp->sno", jacobian(model, x), vectors))


def test_a_posterior_works_without_forward_mode() -> None:
    data = CLASSIFICATION.data()
    posterior = nb.ProjectedPosterior(BackwardOnly(gain=True).double()).fit([data], 3, progress=False)
    spread = posterior.predict(data[0]).variance.max()
    assert spread < 1e-10 * posterior.predict(10 * data[0]).variance.max()


class Depth(nn.Module):
    """Calls its layer once for vectors, twice for sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        return h if x.ndim == 2 else self.layer(h).sum(1)


def test_inputs_of_another_shape_than_the_first_are_linearized() -> None:
    model, generator = Depth().double(), torch.Generator().manual_seed(6)
    network = Network(model)
    vectors = vectors_for(network, 8)
    for shape in ((5, 4), (5, 3, 4), (6, 4)):
        x = randn(*shape, generator=generator, dtype=torch.float64)
        wanted = torch.einsum("nop,sp->sno", jacobian(model, x), vectors)
        torch.testing.assert_close(products.linearized(network, x, vectors)[1], wanted)


@pytest.mark.parametrize("n_vectors", [FEW, MANY])
def test_threads_predict_with_one_network(n_vectors: int) -> None:
    model, (x, _) = Slow().double(), CLASSIFICATION.data()
    network = Network(model)
    vectors = vectors_for(network, n_vectors)
    wanted = torch.einsum("nop,sp->sno", jacobian(model, x), vectors)
    with ThreadPoolExecutor(4) as threads:
        for _, changes in threads.map(lambda _: products.linearized(network, x, vectors), range(8)):
            torch.testing.assert_close(changes, wanted)


class AtZero(nn.Module):
    """Has a ReLU at zero, which rounding opens in large batches: a GPU has other kernels for those."""

    def __init__(self, effect: float) -> None:
        super().__init__()
        self.hidden, self.head, self.effect = nn.Linear(4, 5), nn.Linear(5, 3), effect
        with torch.no_grad():
            self.hidden.weight[0], self.hidden.bias[0] = 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        large = len(x) > products._COMPARED
        rounding = 1e-12 * (1 if large else -1) + (self.effect * x.mean(0).sum() if large else 0.0)
        return self.head((self.hidden(x) + rounding).relu())


def test_a_relu_at_zero_is_not_taken_for_coupled_examples() -> None:
    network, x = Network(AtZero(0.0).double()), randn(40, 4, generator=torch.Generator().manual_seed(0)).double()
    _ = products.output_rows(network, x[:8])  # the route is found on few
    rows = products.output_rows(network, x)
    assert rows[:, 0, :5].abs().sum() > 0  # the unit is open
    assert products._layer_rows(network, x).route.startswith("by layers")


def test_predictions_of_examples_that_influence_each_other_are_refused() -> None:
    network, x = Network(AtZero(0.1).double()), randn(40, 4, generator=torch.Generator().manual_seed(0)).double()
    _ = products.output_rows(network, x[:8])
    with pytest.raises(ModelError, match="influence each other"):
        products.output_rows(network, x)
