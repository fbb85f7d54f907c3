"""Rows that are held as inputs and gradients of layers: the same matrix in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.linalg.compact import SumPiece, TablePiece
from nullbayes.linalg.pieces import DensePiece, OuterPiece
from nullbayes.projectors.auto import choose
from support.drawing import randint

LINES, WIDTH, HIDDEN, CLASSES = 40, 24, 64, 3


class Reader(nn.Module):
    """Sums over the tokens of a sentence, of an embedding and two layers that are applied to each of them."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(LINES, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, LINES if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head((x + self.narrow(self.wide(x).tanh())).sum(1))


def reader(**options: bool) -> Reader:
    torch.manual_seed(0)
    return Reader(**options).double()


def sentences(n: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return randint(LINES, (n, length), generator=generator), randint(CLASSES, (n,), generator=generator)


def kinds(rows: nb.Rows) -> list[str]:
    return [type(piece).__name__ for piece in rows.pieces]  # type: ignore[attr-defined]


@pytest.mark.parametrize("jacobian", [nb.OutputJacobian, nb.LossJacobian])
def test_rows_are_the_same_as_entries(jacobian: type[nb.OutputJacobian]) -> None:
    rows = jacobian(reader(), [sentences(7, 5)])
    held, plain = rows.stored("factors"), rows.stored("device")
    assert {SumPiece.__name__, TablePiece.__name__, OuterPiece.__name__} <= {*kinds(held)}
    assert DensePiece.__name__ in kinds(plain)
    torch.testing.assert_close(held.dense(), plain.dense(), rtol=1e-12, atol=1e-14)
    vectors = torch.randn(4, rows.n_columns, dtype=torch.float64)
    torch.testing.assert_close(held.mv(vectors), vectors @ plain.dense().T, rtol=1e-10, atol=1e-12)
    weights = torch.randn(4, rows.n_rows, dtype=torch.float64)
    torch.testing.assert_close(held.rmv(weights), weights @ plain.dense(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(held.gram(torch.float64), plain.dense() @ plain.dense().T, rtol=1e-10, atol=1e-12)


class Trimmed(Reader):
    """Leaves out the positions at which all sentences of a batch have the token 0, which counts nothing."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : 1 + int((tokens != 0).any(0).nonzero().max())]
        x, counts = self.table(tokens), (tokens != 0)[..., None]
        return self.head(((x + self.narrow(self.wide(x).tanh())) * counts).sum(1))


@pytest.mark.parametrize("length", [6, 60])
def test_the_number_of_positions_may_differ_from_chunk_to_chunk(length: int) -> None:
    """Whether it grows or shrinks, and whether factors are smaller for all of them or for the short ones alone."""
    torch.manual_seed(0)
    model = Trimmed().double()
    tokens, y = sentences(12, length)
    tokens += tokens == 0
    tokens[:5, 3:] = 0
    for order in (range(12), reversed(range(12))):
        index = torch.tensor(list(order))
        rows = nb.LossJacobian(model, [(tokens[index], y[index])])
        rows.working_bytes = 2 * rows.costs().example_bytes
        torch.testing.assert_close(
            rows.stored("factors").dense(), rows.stored("device").dense(), rtol=1e-12, atol=1e-14
        )


def test_a_table_that_is_shared_has_entries() -> None:
    rows = nb.LossJacobian(reader(tied=True), [sentences(5, 4)])
    held = rows.stored("factors")
    assert TablePiece.__name__ not in kinds(held)
    torch.testing.assert_close(held.dense(), rows.stored("device").dense(), rtol=1e-12, atol=1e-14)


def test_costs_are_those_of_what_is_held() -> None:
    rows = nb.LossJacobian(reader(), [sentences(7, 5)])
    for storage in ("device", "factors"):
        held = rows.stored(storage)
        n_bytes = sum(t.numel() * t.itemsize for piece in held.pieces for t in piece.tensors())  # type: ignore[attr-defined]
        assert rows.costs(storage).held_bytes == n_bytes
    assert rows.costs().compact_bytes == rows.costs("factors").held_bytes < rows.costs().held_bytes / 2


def test_a_network_without_positions_is_not_held_as_factors() -> None:
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3))
    assert nb.LossJacobian(model, [(torch.randn(6, 4), torch.arange(6) % 3)]).costs().compact_bytes == 0


def test_factors_are_chosen_where_entries_do_not_fit() -> None:
    rows = nb.LossJacobian(reader().float(), [sentences(1200, 5)])
    asked = {"n_samples": 2, "rtol": 1e-3}
    roomy = choose(rows, memory_limit=2**32, **asked)
    assert roomy.storage == "device"
    limit = rows.costs().full_bytes
    plan = choose(rows, memory_limit=limit, **asked)
    assert plan.storage == "factors"
    assert "held as inputs and gradients of the layers" in str(plan)
    assert plan.peak_bytes <= limit


def test_a_fit_with_factors_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = reader(), sentences(60, 5)
    fits = []
    for storages in (["device"], ["factors"]):
        monkeypatch.setattr("nullbayes.projectors.auto._storages", lambda *_, storages=storages: storages)
        posterior = nb.LossProjectedPosterior(model)
        posterior.fit([data], 3, tolerance=1e-8, generator=torch.Generator().manual_seed(0), progress=False)
        assert max(posterior.report.residual) <= 1e-8
        fits.append(posterior.directions)
    torch.testing.assert_close(fits[0], fits[1], rtol=1e-5, atol=1e-7)


def test_random_combinations_of_rows_that_are_held_as_factors() -> None:
    rows = nb.OutputJacobian(reader().float(), [sentences(30, 5)])
    noise = torch.randn(2, rows.n_columns)
    projector = nb.projectors.Sketched(rtol=1e-4)
    found = [
        projector.apply(projector.prepare(rows.stored(storage)), noise).directions for storage in ("device", "factors")
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-3)
