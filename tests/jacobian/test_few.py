"""The shortcut for the rows of few inputs gives the usual rows, or none where it does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.jacobian import few as few_rows
from nullbayes.jacobian.few import form_few
from nullbayes.jacobian.network import Leaves, Network
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.linalg.compact import TablePiece
from nullbayes.linalg.held import HeldBlock
from support.models import TiedWeights
from support.slow_answers import jacobian


class Wired(nn.Module):
    """Two layers, and something done to what the first puts out, or to the answer."""

    def __init__(self, outputs: int, inside: Callable[[Tensor], Tensor], end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, outputs)
        self.inside, self.end = inside, end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(self.inside(self.first(x)).tanh()))


def same(h: Tensor) -> Tensor:
    return h


def less_the_mean(h: Tensor) -> Tensor:
    return h - h.mean(0) if len(h) > 3 else h


def alone_only(h: Tensor) -> Tensor:
    if len(h) > 3:
        msg = "too many"
        raise ValueError(msg)
    return h


def rows_of(model: nn.Module, x: Tensor) -> RowBuilder:
    network = Network(model)
    return RowBuilder(network, lambda flat, x, y: network(flat, x).flatten(1), x, torch.zeros(len(x)))


def few(rows: RowBuilder, x: Tensor) -> tuple[Tensor, Tensor] | None:
    found = form_few(rows, x, torch.zeros(len(x)))
    if found is None:
        return None
    values, pieces = found
    network = rows.network
    block = HeldBlock(tuple(pieces), values.numel(), network.n_parameters, rows.width, network.theta)
    return values, block.dense().view(*values.shape, -1)


def convolutional(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, outputs)
    ).eval()


@pytest.mark.parametrize("outputs", [1, 3, 7])
@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_few_inputs_are_those_of_plain_differentiation(outputs: int, n: int) -> None:
    model, x = convolutional(outputs).double(), torch.randn(n, 1, 4, 4).double()
    found = few(rows_of(model, x), x)
    assert found is not None
    torch.testing.assert_close(found[0], model(x).detach())
    torch.testing.assert_close(found[1], jacobian(model, x))


class Spare(nn.Module):
    """A layer that is never called, before one that is."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.spare, self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("outputs", [2, 4, 5, 7])  # the first three divide the size of some parameter
def test_parameters_that_no_output_depends_on_have_rows_of_zeros(outputs: int) -> None:
    model, x = Spare(outputs).double(), torch.randn(1, 4).double()
    rows = rows_of(model, x)
    found = few(rows, x)
    assert found is not None
    assert not rows.reasons
    torch.testing.assert_close(found[1], jacobian(model, x))


def test_a_way_whose_rows_were_wrong_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_AT_ONCE", 0)
    model, x = Wired(5, less_the_mean, same).double(), torch.randn(1, 4).double()
    rows = rows_of(model, x)
    assert few(rows, x) is None
    assert "differ" in rows.reasons["by copies"]
    monkeypatch.setattr(few_rows, "_FIRST", 0)  # later inputs are compared once in a while
    assert all(few(rows, x) is None for _ in range(3))


@pytest.mark.parametrize(
    ("way", "limits"),
    [
        ("at once", {}),
        ("by output", {"_CONVOLUTIONS": 0, "_OUTPUTS": 7}),
        ("by copies", {"_AT_ONCE": 0}),
        ("mapped", {"_AT_ONCE": 0, "_FORWARD": 0}),
    ],
)
def test_every_way_gives_the_rows_of_plain_differentiation(
    way: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(few_rows, name, value)
    model, x = convolutional(7).double(), torch.randn(1, 1, 4, 4).double()
    rows = rows_of(model, x)
    found = few(rows, x)
    assert found is not None
    assert not rows.is_due(way, 0, 1, 16)  # that way was taken
    torch.testing.assert_close(found[0], model(x).detach())
    torch.testing.assert_close(found[1], jacobian(model, x))


class Words(nn.Module):
    """Embeddings of words and of positions between other layers, in any order of the parameters."""

    def __init__(self, lines: int, outputs: int) -> None:
        super().__init__()
        self.before, self.words, self.places = nn.LayerNorm(4), nn.Embedding(lines, 4), nn.Embedding(5, 4)
        self.last = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) * (x != 1)[:, :, None] + self.places(torch.arange(x.shape[1]))  # 1 is padding
        return self.last(self.before(h).tanh().mean(1))


@pytest.mark.parametrize("outputs", [1, 3, 7])
@pytest.mark.parametrize("words", [[3, 7, 7, 0], [1, 1, 1, 1]], ids=["words", "nothing but padding"])
@pytest.mark.parametrize(("lines", "kinds"), [(30, ["dense", "table", "dense"]), (8, ["dense"])])
def test_of_a_large_table_of_embeddings_the_lines_of_an_input_are_kept(
    lines: int, kinds: list[str], words: list[int], outputs: int
) -> None:
    model, x = Words(lines, outputs).double(), torch.tensor([words])
    kinds = kinds if words[0] != 1 else ["dense", "table", "dense"]  # padding takes no line
    rows = rows_of(model, x)
    found = form_few(rows, x, torch.zeros(1))
    assert found is not None
    assert ["table" if isinstance(piece, TablePiece) else "dense" for piece in found[1]] == kinds
    expected = jacobian(model, x)[0]
    block = HeldBlock(tuple(found[1]), outputs, rows.network.n_parameters, outputs, rows.network.theta)
    torch.testing.assert_close(block.dense(), expected)
    vectors = torch.randn(5, rows.network.n_parameters).double()
    torch.testing.assert_close(block.mv(vectors), vectors @ expected.T)
    weights = torch.randn(5, outputs).double()
    torch.testing.assert_close(block.rmv(weights), weights @ expected)


@pytest.mark.parametrize("limits", [{"_AT_ONCE": 0}, {"_AT_ONCE": 0, "_FORWARD": 0}], ids=["by copies", "mapped"])
def test_layers_are_not_asked_where_a_weight_has_a_second_use(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(few_rows, name, value)
    rows = rows_of(Gated().double(), torch.randn(3, 4).double())
    monkeypatch.setattr(rows, "is_due", lambda *_: False)  # as if the comparison had missed it
    assert few(rows, torch.randn(1, 4).double() + 7.0) is None


def test_parameter_with_two_names_is_exchanged_under_both() -> None:
    model, x = TiedWeights(3).double(), torch.randn(1, 4).double()
    found = few(rows_of(model, x), x)
    assert found is not None
    torch.testing.assert_close(found[1], jacobian(model, x))


def test_copies_that_influence_each_other_give_no_rows() -> None:
    model, x = Wired(6, less_the_mean, same), torch.randn(2, 4)
    rows = rows_of(model, x)
    assert few(rows, x) is None
    changes = linearized(rows.network, x, torch.eye(rows.network.n_parameters))[1]
    torch.testing.assert_close(changes.permute(1, 2, 0), jacobian(model, x))


def test_network_that_cannot_take_copies_of_inputs_uses_the_usual_rows() -> None:
    model, x = Wired(6, alone_only, same), torch.randn(2, 4)
    rows = rows_of(model, x)
    assert few(rows, x) is None
    torch.testing.assert_close(linearized(rows.network, x, rows.network.theta[None])[0], model(x).detach())


def test_outputs_that_differ_between_two_calls_give_no_rows() -> None:
    strange = False

    def noisy(h: Tensor) -> Tensor:
        return h + torch.rand(()) if strange else h

    x = torch.randn(1, 4)
    rows = rows_of(Wired(2, same, noisy), x)
    assert few(rows, x) is not None
    strange = True
    assert few(rows, x) is None


@pytest.mark.parametrize("fails", [False, True])
def test_module_has_its_own_parameters_back_after_a_call(fails: bool) -> None:
    network = Network(Wired(2, same, same))
    leaves = Leaves.of(network)
    assert leaves is not None
    before = list(network.module.parameters())
    if fails:
        with pytest.raises(RuntimeError):
            leaves.outputs(torch.randn(1, 5))
    else:
        leaves.outputs(torch.randn(1, 4))
    assert all(now is then for now, then in zip(network.module.parameters(), before, strict=True))


def test_recurrent_networks_do_not_use_the_shortcut_for_few_inputs() -> None:
    assert Leaves.of(Network(nn.GRU(2, 3), output_fn=lambda returned: returned[0])) is None


@pytest.mark.parametrize("outputs", [2, 8])
def test_a_single_input_is_predicted_as_in_a_batch(outputs: int) -> None:
    model, x = convolutional(outputs), torch.randn(50, 1, 4, 4)
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(
        [(x[:10], torch.arange(10) % outputs)], n_samples=20, progress=False
    )
    together, alone = posterior.predict(x), posterior.predict(x[20:21])
    torch.testing.assert_close(alone.mean[0], together.mean[20], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.variance[0], together.variance[20], rtol=1e-3, atol=1e-4)


class Gated(nn.Module):
    """Uses a weight a second time, for inputs that are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate = (x[:, :1] - 5.0).relu()
        return self.last((self.first(x) + gate * nn.functional.linear(x, self.first.weight.roll(1, 0))).tanh())


@pytest.mark.parametrize("n", [1, 2])
def test_rare_inputs_are_predicted_correctly_whatever_came_before(n: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gated().double()
    near, far = torch.randn(n, 4).double(), torch.randn(n, 4).double() + 7.0
    network = Network(model)
    directions = torch.eye(network.n_parameters).double()
    for k in (1, n):
        for _ in range(40):
            linearized(network, near[:k], directions)
    changes = linearized(network, far, directions)[1]
    torch.testing.assert_close(changes.permute(1, 2, 0), jacobian(model, far))


def test_each_route_is_checked_at_first_and_then_now_and_then() -> None:
    rows = rows_of(convolutional(3), torch.randn(3, 1, 4, 4))
    due = [rows.is_due("one", 1, 4, 16) for _ in range(40)]
    assert due == [True] * 4 + ([False] * 15 + [True]) * 2 + [False] * 4
    assert rows.is_due("another", 1, 4, 16)
