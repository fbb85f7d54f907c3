"""Gram matrices from entries of eleven bits, in every mixture of pieces."""

import pytest
import torch
from torch import Tensor

from nullbayes.linalg import halves_gram, held
from nullbayes.linalg.compact import SumPiece
from nullbayes.linalg.halves import add_cross
from nullbayes.linalg.halves_gram import gram_by_halves
from nullbayes.linalg.pieces import DensePiece, Piece
from support.layouts import MIXTURES, Layout, gaussian, layout

every_mixture = pytest.mark.parametrize("kind", MIXTURES)


def assert_same(found: Layout, working_bytes: int = 2**28) -> None:
    """Compare with the Gram matrix in float64: entries of eleven bits move each row by at most 1e-3 of its length."""
    rows = found.rows()
    gram = gram_by_halves(rows.pieces, rows.n_rows, rows.rows_per_example, working_bytes)
    assert gram.dtype == torch.float32
    expected = rows.gram(torch.float64)
    lengths = expected.diagonal().sqrt()
    assert ((gram.double() - expected).abs() <= 2e-3 * lengths * lengths[:, None]).all()


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("outputs", [1, 3])
@every_mixture
def test_matrix_matches_that_in_float64(kind: str, outputs: int, order: int) -> None:
    assert_same(layout(kind, outputs=outputs, order=order, dtype=torch.float32))


@pytest.mark.parametrize("working_bytes", [1, 700, 3000])
@every_mixture
def test_tiles_and_columns_can_be_few_at_a_time(kind: str, working_bytes: int) -> None:
    assert_same(layout(kind, n=9, dtype=torch.float32), working_bytes)


@pytest.mark.parametrize("size", [2.0**-50, 2.0**-17, 2.0**17, 2.0**50])
@every_mixture
def test_rows_too_long_or_short_for_halves_are_scaled(kind: str, size: float) -> None:
    found = layout(kind, dtype=torch.float32)
    for piece in found.pieces:
        gradients = piece.tensors()[-1]
        gradients[::2] *= size  # beside others that are as they were
    assert_same(found)


@pytest.mark.parametrize(
    ("most", "each", "step"),
    [(16384, 10, 16360), (16384, 1, 16384), (100, 3, 96), (20, 3, 18), (39, 10, 30), (1, 3, 3)],
)
def test_tiles_have_whole_examples_and_a_number_of_rows_that_is_multiplied_fast(
    most: int, each: int, step: int
) -> None:
    assert halves_gram._tile_size(most, each) == step


def written_out(*pieces: Piece) -> Layout:
    entries = torch.zeros(16, 20)
    for piece in pieces:
        piece.put_dense(entries)
    return Layout(list(pieces), entries.double(), 8, 2, torch.float32)


@pytest.mark.parametrize("bias", [None, 12])
@pytest.mark.parametrize("size", [1e-20, 1e-10, 1e10])
def test_inputs_too_large_or_small_for_halves_are_scaled(size: float, bias: int | None) -> None:
    inputs, gradients = gaussian(8, 5, 4, dtype=torch.float32), gaussian(8, 2, 3, 5, seed=1, dtype=torch.float32)
    inputs[::3] *= size
    assert_same(written_out(SumPiece(inputs, gradients, 0, bias)))


@pytest.mark.parametrize("unit", [1.0, 1e-12])
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-6, 1e6, 1e12])
def test_pieces_held_as_halves_may_differ_in_size(size: float, unit: float) -> None:
    """Each has its own scale; a row of zeros in one of them has none."""
    parts = [unit * gaussian(16, width, seed=width, dtype=torch.float32) for width in (12, 8)]
    parts[1][::2] *= size
    halved = [DensePiece(part, column).halved() for part, column in zip(parts, (0, 12), strict=True)]
    assert_same(written_out(*halved))


@pytest.mark.parametrize("wide", [1, 7, 2048])
@every_mixture
def test_columns_are_multiplied_together(kind: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves_gram, "_WIDE", wide)
    assert_same(layout(kind, n=9, dtype=torch.float32))


def test_narrow_pieces_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []

    def seen(tile: Tensor, left: Tensor, right: Tensor) -> None:
        widths.append(left.shape[1])
        add_cross(tile, left, right)

    monkeypatch.setattr(halves_gram, "add_cross", seen)
    pieces = [DensePiece(gaussian(16, 4, seed=i, dtype=torch.float32), 4 * i).halved() for i in range(5)]
    assert_same(written_out(*pieces))
    assert widths == [24]  # 20 columns, and zeros up to a multiple of 8


def test_a_tile_has_few_rows_where_inputs_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, gradients = gaussian(8, 50, 40, dtype=torch.float32), gaussian(8, 2, 3, 50, seed=1, dtype=torch.float32)
    tiles: list[tuple[int, ...]] = []

    def seen(tile: Tensor, left: Tensor, right: Tensor) -> None:
        tiles.append(tuple(tile.shape))
        add_cross(tile, left, right)

    monkeypatch.setattr(halves_gram, "add_cross", seen)
    gram_by_halves(
        [SumPiece(inputs, gradients, 0, None)], 16, 2, 4 * 8 * 50 * 40 // 2
    )  # room for those of two examples
    assert max(tiles) == (4, 4)


def test_inputs_of_zeros_do_not_set_the_scale() -> None:
    gradients = 1e8 * gaussian(8, 2, 3, 5, seed=1, dtype=torch.float32)
    entries = DensePiece(1e-3 * gaussian(16, 8, dtype=torch.float32), 12)
    assert_same(written_out(SumPiece(torch.zeros(8, 5, 4), gradients, 0, None), entries))


@pytest.mark.parametrize("inputs", [1.0, 1e8])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-39, 2e-38, 1e-37, 1e-33, 1e-29])
def test_rows_that_are_almost_zero_do_no_harm(size: float, inputs: float) -> None:
    """Such as those of losses that are as good as zero: in float32, their squares are."""
    gradients = gaussian(8, 2, 3, 5, seed=1, dtype=torch.float32)
    gradients[2] *= size
    found = written_out(SumPiece(inputs * gaussian(8, 5, 4, dtype=torch.float32), gradients, 0, 12))
    gram = gram_by_halves(found.pieces, 16, 2, 2**28).double()
    assert torch.isfinite(gram).all()
    others = [i for i in range(16) if i not in (4, 5)]
    expected = (found.matrix @ found.matrix.T)[others][:, others]
    lengths = expected.diagonal().sqrt()
    assert ((gram[others][:, others] - expected).abs() <= 2e-3 * lengths * lengths[:, None]).all()


def test_rows_of_zeros_stay_zero() -> None:
    piece = SumPiece(torch.zeros(3, 2, 4), torch.zeros(3, 2, 3, 2), 0, 12)
    assert not gram_by_halves([piece], 6, 2, 2**20).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """The factorization then names it."""
    gradients = gaussian(3, 2, 3, 2, dtype=torch.float32)
    gradients[1, 0, 0, 0] = bad
    gram = gram_by_halves([SumPiece(gaussian(3, 2, 4, dtype=torch.float32), gradients, 0, 12)], 6, 2, 2**20)
    assert not torch.isfinite(gram.diagonal()[2])
    assert torch.isfinite(gram.diagonal()[[0, 1, 3, 4, 5]]).all()


def test_blocks_take_it_in_float32_where_halves_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def seen(*args: object) -> Tensor:
        calls.append(1)
        return gram_by_halves(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(held, "gram_by_halves", seen)
    for fast in (False, True):
        monkeypatch.setattr(held, "half_is_fast", lambda _, fast=fast: fast)
        for kind, dtype in (
            ("entries", torch.float32),
            ("half", torch.float64),
            ("half", torch.float32),
            ("several positions", torch.float64),
            ("several positions", torch.float32),
        ):
            layout(kind, dtype=torch.float32).rows().block(0, 21).gram(dtype)
    assert calls == [1, 1]
