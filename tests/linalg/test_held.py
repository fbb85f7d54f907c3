"""Rows held as pieces multiply like the matrix that they stand for."""

import itertools

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import SettingsError
from nullbayes.linalg.held import HeldBlock, HeldRows, StreamedBlock
from nullbayes.linalg.pieces import OuterPiece
from support.layouts import MIXTURES, gaussian, layout
from support.limited import limited

N, OUTPUTS = 7, 3
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
every_mixture = pytest.mark.parametrize("kind", MIXTURES)


def near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 0.0, "atol": 200 * torch.finfo(dtype).eps}


def single_error(matrix: Tensor) -> float:
    """What a Gram matrix in float32 may be wrong by; on a GPU, factors of ten bits are multiplied."""
    eps = torch.finfo(torch.float32).eps if matrix.device.type == "cpu" else 2.0**-10
    return 4 * eps * float((matrix.abs() @ matrix.abs().T).max())


@dtypes
@every_mixture
def test_products_match_the_dense_matrix(kind: str, dtype: torch.dtype) -> None:
    found = layout(kind, order=1, dtype=dtype)
    rows, expected = found.rows(), found.matrix
    right, left = gaussian(4, expected.shape[1], seed=3, dtype=dtype), gaussian(4, N * OUTPUTS, seed=4, dtype=dtype)
    assert rows.dense().dtype == rows.mv(right).dtype == rows.rmv(left).dtype == dtype
    torch.testing.assert_close(rows.dense().double(), expected, **near(dtype))
    torch.testing.assert_close(rows.mv(right).double(), right.double() @ expected.T, **near(dtype))
    torch.testing.assert_close(rows.rmv(left).double(), left.double() @ expected, **near(dtype))
    torch.testing.assert_close(rows.norms(right), (right.double() @ expected.T).norm(dim=1), **near(dtype))


@every_mixture
def test_gram_matrix_of_float32_rows_can_be_accumulated_in_float64(kind: str) -> None:
    found = layout(kind, dtype=torch.float32)
    block, expected = found.rows().block(0, N * OUTPUTS), found.matrix
    gram = block.gram(torch.float64)
    assert gram.dtype == torch.float64
    torch.testing.assert_close(gram, expected @ expected.T, rtol=0, atol=1e-12)
    single = block.gram(torch.float32)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected @ expected.T, rtol=0, atol=single_error(expected))


@every_mixture
def test_blocks_can_be_cut_between_any_two_examples(kind: str) -> None:
    found = layout(kind, order=2)
    rows, expected = found.rows(), found.matrix
    vectors = gaussian(2, expected.shape[1], seed=5)
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


@pytest.mark.parametrize(("examples", "outputs"), [(700, 3), (3, 700), (2100, 1)])
def test_gram_matrix_larger_than_a_tile_is_right(examples: int, outputs: int) -> None:
    piece = OuterPiece(gaussian(examples, 2), gaussian(examples, outputs, 2, seed=1), 0, 4)
    n_rows = examples * outputs
    rows = HeldRows(
        [piece], n_rows=n_rows, n_columns=6, like=torch.empty(0, dtype=torch.float64), rows_per_example=outputs
    )
    entries = rows.dense()
    torch.testing.assert_close(rows.block(0, n_rows).gram(torch.float64), entries @ entries.T)


def test_blocks_are_views() -> None:
    matrix = gaussian(6, 4)
    rows = nb.DenseRows(matrix)
    (piece,) = rows.pieces
    assert piece.take(slice(2, 4)).tensors()[0].data_ptr() == matrix[2:].data_ptr()
    assert rows.keep() is rows
    assert rows.costs().held_bytes == 0


@pytest.mark.parametrize(
    ("matrix", "match"),
    [
        (torch.zeros(3), "at least one row and one column"),
        (torch.zeros(0, 3), "at least one row and one column"),
        (torch.zeros(3, 0), "at least one row and one column"),
        (torch.zeros(2, 2, dtype=torch.int64), "floating-point"),
        (torch.eye(2).to_sparse(), r"not a torch.sparse_coo one: .*to_dense"),
        ([[1.0, 2.0]], r"not a list: torch.as_tensor"),
        (torch.tensor([[1.0, float("nan")]]), "NaN or Inf"),
        (torch.tensor([[float("inf")]]), "NaN or Inf"),
    ],
)
def test_matrix_that_cannot_be_rows_is_refused(matrix: Tensor, match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        nb.DenseRows(matrix)


def test_rows_do_not_track_gradients() -> None:
    rows = nb.DenseRows(torch.ones(2, 3, requires_grad=True))
    assert not rows.mv(torch.ones(1, 3)).requires_grad


def test_a_cut_through_an_example_is_refused() -> None:
    piece = OuterPiece(torch.ones(2, 3), torch.ones(2, 2, 4), 0, 12)
    rows = HeldRows([piece], n_rows=4, n_columns=16, like=torch.ones(1), rows_per_example=2)
    assert rows.block(2, 4).n_rows == 2
    with pytest.raises(SettingsError, match="belong together"):
        rows.block(1, 3)


# --- formed part by part ---


def streamed(rows: HeldRows, examples: int, formed: list[slice] | None = None) -> StreamedBlock:
    """All rows, so many examples at a time; tells what is formed, and forms it anew at every call."""
    step = examples * rows.rows_per_example
    parts = tuple(slice(i, min(rows.n_rows, i + step)) for i in range(0, rows.n_rows, step))

    def form(part: slice) -> HeldBlock:
        if formed is not None:
            formed.append(part)
        return rows.block(part.start, part.stop)

    return StreamedBlock(parts, form, rows.n_rows, torch.empty(0, dtype=rows.dtype))


@pytest.mark.parametrize("tile", [1, 7, 1000])
@pytest.mark.parametrize("examples", range(1, 9))
@every_mixture
def test_block_formed_in_parts_is_the_block(
    kind: str, examples: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, tile_rows=tile)
    found = layout(kind, order=1)
    block, whole = streamed(found.rows(), examples), found.matrix
    right, left = gaussian(3, whole.shape[1], seed=3), gaussian(3, len(whole), seed=4)
    torch.testing.assert_close(block.dense(), whole)
    torch.testing.assert_close(block.mv(right), right @ whole.T)
    torch.testing.assert_close(block.rmv(left), left @ whole)
    gram = block.gram(torch.float64)
    torch.testing.assert_close(gram, whole @ whole.T)
    torch.testing.assert_close(gram, found.rows().block(0, len(whole)).gram(torch.float64))
    single = block.gram(torch.float32)
    torch.testing.assert_close(single.double(), whole @ whole.T, rtol=0, atol=single_error(whole))


def test_parts_are_formed_once_per_product_and_in_pairs_for_a_gram_matrix() -> None:
    formed: list[slice] = []
    block = streamed(layout("weight and bias").rows(), 2, formed)  # four parts
    block.mv(gaussian(1, 25))
    assert [part.start for part in formed] == [0, 6, 12, 18]
    formed.clear()
    block.gram(torch.float64)
    assert len(formed) == 4 + 6


# --- approximations ---


def test_rows_in_half_precision_refer_to_their_full_precision_rows() -> None:
    matrix = gaussian(6, 4).float()
    true = nb.DenseRows(matrix)
    assert true.reference is true
    half = HeldRows([true.pieces[0].halved()], n_rows=6, n_columns=4, like=matrix, reference=true)
    assert half.reference is true
    torch.testing.assert_close(half.dense(), matrix, rtol=2**-11, atol=1e-6)
    assert not torch.equal(half.dense(), matrix)
