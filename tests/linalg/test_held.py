"""Rows held as pieces multiply like the matrix that they stand for."""

import itertools

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from drawing import randn
from nullbayes.errors import SettingsError
from nullbayes.linalg.held import HeldRows
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece

N, OUTPUTS, FAN_IN, OUT = 7, 3, 4, 5
WEIGHT, BIAS = 2, 2 + OUT * FAN_IN  # first columns; columns 0 and 1 belong to none
P = BIAS + OUT + 6

PIECES = {
    "weight and bias": (WEIGHT, BIAS),
    "weight": (WEIGHT, None),
    "bias": (None, BIAS),
}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outer(kind: str, dtype: torch.dtype = torch.float64) -> OuterPiece:
    return OuterPiece(gaussian(N, FAN_IN, dtype=dtype), gaussian(N, OUTPUTS, OUT, seed=1, dtype=dtype), *PIECES[kind])


def dense_piece(dtype: torch.dtype = torch.float64) -> DensePiece:
    return DensePiece(gaussian(N * OUTPUTS, 6, seed=2, dtype=dtype), BIAS + OUT)


def written_out(piece: Piece) -> Tensor:
    """The entries, one at a time."""
    result = torch.zeros(N * OUTPUTS, P, dtype=torch.float64)
    if isinstance(piece, DensePiece):
        result[:, piece.column : piece.column + piece.matrix.shape[1]] = piece.matrix
        return result
    assert isinstance(piece, OuterPiece)
    for n, o, j in itertools.product(range(N), range(OUTPUTS), range(OUT)):
        row, gradient = n * OUTPUTS + o, piece.gradients[n, o, j].double()
        if piece.weight is not None:
            for i in range(FAN_IN):
                result[row, piece.weight + j * FAN_IN + i] = gradient * piece.activations[n, i].double()
        if piece.bias is not None:
            result[row, piece.bias + j] = gradient
    return result


def held(pieces: list[Piece], dtype: torch.dtype = torch.float64) -> HeldRows:
    return HeldRows(pieces, n_rows=N * OUTPUTS, n_columns=P, like=torch.empty(0, dtype=dtype), granule=OUTPUTS)


def all_pieces(dtype: torch.dtype = torch.float64) -> dict[str, list[Piece]]:
    single = {kind: [outer(kind, dtype)] for kind in PIECES}
    return {**single, "dense": [dense_piece(dtype)], "both": [dense_piece(dtype), outer("weight and bias", dtype)]}


every_kind = pytest.mark.parametrize("kind", all_pieces())


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 0.0, "atol": 200 * torch.finfo(dtype).eps}


@dtypes
@every_kind
def test_products_are_those_of_the_matrix(kind: str, dtype: torch.dtype) -> None:
    pieces = all_pieces(dtype)[kind]
    rows, expected = held(pieces, dtype), sum(written_out(piece) for piece in pieces)
    right, left = gaussian(4, P, seed=3, dtype=dtype), gaussian(4, N * OUTPUTS, seed=4, dtype=dtype)
    assert rows.dense().dtype == rows.mv(right).dtype == rows.rmv(left).dtype == dtype
    torch.testing.assert_close(rows.dense().double(), expected, **near(dtype))
    torch.testing.assert_close(rows.mv(right).double(), right.double() @ expected.T, **near(dtype))
    torch.testing.assert_close(rows.rmv(left).double(), left.double() @ expected, **near(dtype))
    torch.testing.assert_close(rows.norms(right), (right.double() @ expected.T).norm(dim=1), **near(dtype))


@every_kind
def test_gram_matrix_of_float32_rows_can_be_accumulated_in_float64(kind: str) -> None:
    pieces = all_pieces(torch.float32)[kind]
    block = held(pieces, torch.float32).block(0, N * OUTPUTS)
    expected = sum(written_out(piece) for piece in pieces)
    gram = block.gram(torch.float64)
    assert gram.dtype == torch.float64
    torch.testing.assert_close(gram, expected @ expected.T, rtol=0, atol=1e-12)
    single = block.gram(torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected @ expected.T, rtol=0, atol=1e-4)


@every_kind
def test_blocks_can_be_cut_between_any_two_examples(kind: str) -> None:
    pieces = all_pieces()[kind]
    rows, expected = held(pieces), sum(written_out(piece) for piece in pieces)
    vectors = gaussian(2, P, seed=5)
    for first, last in itertools.combinations(range(N + 1), 2):
        start, stop = first * OUTPUTS, last * OUTPUTS
        block = rows.block(start, stop)
        assert block.n_rows == stop - start
        torch.testing.assert_close(block.dense(), expected[start:stop])
        torch.testing.assert_close(block.mv(vectors), vectors @ expected[start:stop].T)
        torch.testing.assert_close(
            block.rmv(block.mv(vectors)), vectors @ expected[start:stop].T @ expected[start:stop]
        )
        torch.testing.assert_close(block.gram(torch.float64), expected[start:stop] @ expected[start:stop].T)


@every_kind
def test_tiles_of_the_gram_matrix_are_products_of_two_ranges(kind: str) -> None:
    for piece in all_pieces()[kind]:
        entries = written_out(piece)
        for a, b, c, d in [(0, 7, 0, 7), (0, 2, 3, 7), (5, 6, 0, 1)]:
            left, right = slice(a * OUTPUTS, b * OUTPUTS), slice(c * OUTPUTS, d * OUTPUTS)
            torch.testing.assert_close(
                piece.take(left).cross(piece.take(right), torch.float64, 2**20), entries[left] @ entries[right].T
            )


@pytest.mark.parametrize(("examples", "outputs"), [(700, 3), (3, 700), (2100, 1)])
def test_gram_matrix_larger_than_a_tile(examples: int, outputs: int) -> None:
    piece = OuterPiece(gaussian(examples, 2), gaussian(examples, outputs, 2, seed=1), 0, 4)
    n_rows = examples * outputs
    rows = HeldRows([piece], n_rows=n_rows, n_columns=6, like=torch.empty(0, dtype=torch.float64), granule=outputs)
    entries = rows.dense()
    torch.testing.assert_close(rows.block(0, n_rows).gram(torch.float64), entries @ entries.T)


def test_blocks_are_views() -> None:
    matrix = gaussian(6, 4)
    rows = nb.DenseRows(matrix)
    (piece,) = rows.pieces
    assert piece.take(slice(2, 4)).tensors()[0].data_ptr() == matrix[2:].data_ptr()
    assert rows.keep() is rows
    assert rows.kept_bytes() == 0


@every_kind
def test_pieces_are_filled_a_range_at_a_time(kind: str) -> None:
    for piece in all_pieces()[kind]:
        empty = piece.allocate(N * OUTPUTS, piece.tensors()[0].device)
        for first, last in [(0, 3), (3, 7)]:
            where = slice(first * OUTPUTS, last * OUTPUTS)
            empty.take(where).fill(piece.take(where))
        torch.testing.assert_close(written_out(empty), written_out(piece))
        assert piece.n_bytes() == sum(tensor.numel() * tensor.itemsize for tensor in piece.tensors()) > 0


def test_outer_products_cost_less_than_their_entries() -> None:
    wide = OuterPiece(gaussian(N, 50), gaussian(N, OUTPUTS, 40), 0, None)
    entries = 50 * 40
    gram, product = wide.costs()
    assert 0 < gram < 2 * entries
    assert 0 < product < 2 * entries
    assert wide.n_bytes() < N * OUTPUTS * entries * 8
    assert dense_piece().costs() == (12.0, 12.0)
    both = held(all_pieces()["both"])
    assert both.gram_cost() == sum(piece.costs()[0] for piece in both.pieces)
    assert both.product_cost() == sum(piece.costs()[1] for piece in both.pieces)


@pytest.mark.parametrize(
    ("matrix", "match"),
    [
        (torch.zeros(3), "at least one row and one column"),
        (torch.zeros(0, 3), "at least one row and one column"),
        (torch.zeros(3, 0), "at least one row and one column"),
        (torch.zeros(2, 2, dtype=torch.int64), "floating-point"),
        (torch.tensor([[1.0, float("nan")]]), "NaN or Inf"),
        (torch.tensor([[float("inf")]]), "NaN or Inf"),
    ],
)
def test_matrix_that_makes_no_rows_is_refused(matrix: Tensor, match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        nb.DenseRows(matrix)


def test_rows_do_not_track_gradients() -> None:
    rows = nb.DenseRows(torch.ones(2, 3, requires_grad=True))
    assert not rows.mv(torch.ones(1, 3)).requires_grad


def test_a_cut_through_an_example_is_refused() -> None:
    piece = OuterPiece(torch.ones(2, 3), torch.ones(2, 2, 4), 0, 12)
    rows = HeldRows([piece], n_rows=4, n_columns=16, like=torch.ones(1), granule=2)
    assert rows.block(2, 4).n_rows == 2
    with pytest.raises(SettingsError, match="belong together"):
        rows.block(1, 3)
