"""A weight that several layers share has one row: the sum of what each layer contributes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.jacobian.network import Network
from nullbayes.linalg.pieces import DensePiece, OuterPiece
from support.slow_answers import jacobian

X, Y = torch.tensor([[0, 1, 1], [4, 2, 0], [3, 3, 3], [1, 0, 4]]), torch.tensor([0, 1, 2, 4])


class Language(nn.Module):
    """A bag of words with a tied decoder that has a bias of its own."""

    def __init__(self, *, twice: bool = False, elsewhere: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        self.decoder.weight = self.words.weight
        self.twice, self.elsewhere = twice, elsewhere

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.words(x).mean(1)).tanh()
        logits = self.decoder(h)
        if self.twice:
            logits = logits + self.decoder(h.sin())
        return logits + F.linear(h.cos(), self.words.weight) if self.elsewhere else logits


def build(**options: bool) -> Language:
    torch.manual_seed(0)
    return Language(**options).double()


@pytest.mark.parametrize("parameters", [None, "words.weight", ["words.weight", "decoder.bias"]], ids=str)
def test_a_tied_embedding_has_the_sum_of_two_shares(parameters: list[str] | str | None) -> None:
    model = build()
    rows = nb.OutputJacobian(model, [(X, Y)], parameters=parameters)
    assert rows.route == "by layers (100% of the parameters)"
    names = [parameters] if isinstance(parameters, str) else parameters
    torch.testing.assert_close(rows.dense(), jacobian(model, X, names).flatten(0, 1))


def test_a_glob_finds_a_tied_weight_by_each_of_its_names() -> None:
    for pattern in ("decoder.*", "decoder.weight", "words.*"):
        names = Network(build(), pattern).names
        assert names == (("words.weight", "decoder.bias") if pattern == "decoder.*" else ("words.weight",))
    rows = nb.OutputJacobian(build(), [(X, Y)], parameters="decoder.*")
    torch.testing.assert_close(rows.dense(), jacobian(build(), X, ["words.weight", "decoder.bias"]).flatten(0, 1))
    # a predicate sees the first name alone, so that what it leaves out stays out
    assert "words.weight" not in Network(build(), lambda name, _: not name.startswith("words")).names


def test_a_shared_weight_is_one_piece_and_the_bias_beside_it_stays_factored() -> None:
    pieces = nb.OutputJacobian(build(), [(X, Y)]).keep().pieces
    assert [type(piece) for piece in pieces].count(DensePiece) == 1
    assert [(piece.weight is None, piece.bias) for piece in pieces if isinstance(piece, OuterPiece)] == [
        (False, 24), (True, 27),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [nb.OutputJacobian, nb.LossJacobian])
def test_gram_and_normal_matrices_hold_the_products_of_both_shares(kind: type[nb.OutputJacobian]) -> None:
    rows = kind(build(), [(X, Y)])
    dense = rows.dense()
    torch.testing.assert_close(rows.block(0, rows.n_rows).gram(torch.float64), dense @ dense.T)
    torch.testing.assert_close(rows.keep().block(0, rows.n_rows).gram(torch.float64), dense @ dense.T)


@pytest.mark.parametrize("options", [{"twice": True}, {"elsewhere": True}], ids=str)
def test_a_shared_weight_with_a_use_that_no_rule_covers_uses_vmap(options: dict[str, bool]) -> None:
    model = build(**options)
    rows = nb.OutputJacobian(model, [(X, Y)])
    assert rows.route == "vmap(jacrev)"
    torch.testing.assert_close(rows.dense(), jacobian(model, X).flatten(0, 1))


def test_gpt2_linear_layers_have_a_rule() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model = nn.Sequential(utils.Conv1D(4, 3), nn.Tanh(), nn.Flatten(), utils.Conv1D(2, 8)).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    rows = nb.OutputJacobian(model, [(x, torch.tensor([0, 1, 1, 0]))])
    assert rows.route == "by layers (100% of the parameters)"
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))
