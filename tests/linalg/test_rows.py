"""Rows are cut into blocks without losing one, and multiply the same however they are known."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import SettingsError
from nullbayes.linalg.held import HeldRows
from nullbayes.linalg.pieces import DensePiece
from nullbayes.linalg.rows import Block, Rows
from nullbayes.projectors import Alternating, ExactDual, Krylov
from nullbayes.testing import kernel_projector
from support.drawing import randn


class Counted(Rows):
    """Rows that are nothing but their number."""

    def __init__(self, n_rows: int, rows_per_example: int) -> None:
        self.n_rows, self.n_columns, self.rows_per_example = n_rows, 10, rows_per_example
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def block(self, start: int, stop: int) -> Block:
        raise NotImplementedError

    def keep(self) -> Rows:
        raise NotImplementedError


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def matrix_free(matrix: Tensor, block_rows: int | None = None) -> nb.MatrixFreeRows:
    return nb.MatrixFreeRows(
        lambda vectors, rows: vectors @ matrix[rows].T,
        lambda vectors, rows: vectors @ matrix[rows],
        n_rows=len(matrix),
        n_columns=matrix.shape[1],
        block_rows=block_rows,
        dtype=matrix.dtype,
        device=matrix.device,
    )


# --- cuts ---


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    examples=st.integers(1, 5_000),
    each=st.integers(1, 12),
    cut_short=st.booleans(),
    block_rows=st.integers(1, 9_000),
)
def test_blocks_hold_each_row_once_in_order(examples: int, each: int, cut_short: bool, block_rows: int) -> None:
    n_rows = max(1, examples * each - (each // 2 if cut_short else 0))  # the last example may be incomplete
    cuts = Counted(n_rows, each).cuts(block_rows)
    assert [stop for _, stop in cuts[:-1]] == [start for start, _ in cuts[1:]]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == n_rows
    assert all(start < stop for start, stop in cuts)
    assert all(start % each == 0 for start, _ in cuts)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(examples=st.integers(1, 5_000), each=st.integers(1, 12), block_rows=st.integers(1, 9_000))
def test_blocks_are_even_and_no_larger_than_asked_for(examples: int, each: int, block_rows: int) -> None:
    sizes = [stop - start for start, stop in Counted(examples * each, each).cuts(block_rows)]
    assert max(sizes) <= max(each, block_rows)
    assert max(sizes) - min(sizes) <= each
    fewest = -(-examples // max(1, block_rows // each))
    assert len(sizes) == fewest


@pytest.mark.parametrize("block_rows", [0, -1])
def test_empty_blocks_are_refused(block_rows: int) -> None:
    with pytest.raises(SettingsError, match="block_rows must be at least 1"):
        Counted(10, 1).cuts(block_rows)


def test_costs_of_dense_rows_are_counted() -> None:
    rows = Counted(7, 1)
    costs = rows.costs()
    assert costs.gram_flops == costs.product_flops == 20
    assert costs.normal_flops == 700
    assert costs.full_bytes == costs.held_bytes == 7 * 10 * 4
    assert rows.costs("half").held_bytes == 7 * 10 * 2
    assert rows.costs("recompute").held_bytes == 0


# --- products ---


@pytest.mark.parametrize("n_rows", [1, 30, 5000])  # the last is walked in two steps
def test_products_of_many_rows_miss_none(n_rows: int) -> None:
    matrix = gaussian(n_rows, 9)
    rows = HeldRows([DensePiece(matrix, 0)], n_rows=n_rows, n_columns=9, like=matrix)
    right, left = gaussian(3, 9, seed=1), gaussian(3, n_rows, seed=2)
    torch.testing.assert_close(rows.mv(right), right @ matrix.T)
    torch.testing.assert_close(rows.rmv(left), left @ matrix)
    torch.testing.assert_close(rows.norms(right), (right @ matrix.T).norm(dim=1))
    assert torch.equal(rows.dense(), matrix)


def test_norms_are_summed_in_float64() -> None:
    rows = nb.DenseRows(torch.full((10, 1), 1e25))
    assert float(rows.norms(torch.ones(1, 1))) == pytest.approx(1e25 * 10**0.5, rel=1e-6)  # squares overflow float32


def test_frobenius_norm_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = gaussian(200, 300, seed=5)
    rows = nb.DenseRows(matrix)
    assert rows.frobenius() == pytest.approx(float(matrix.norm()), rel=0.1)
    before = rows.frobenius()
    monkeypatch.setattr(rows, "norms", None)  # no second pass over the rows
    assert rows.frobenius() == before


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 5), (5, 6)])
def test_matrix_free_rows_are_dense_rows(start: int, stop: int) -> None:
    matrix = gaussian(6, 9)
    free, dense = matrix_free(matrix).block(start, stop), nb.DenseRows(matrix).block(start, stop)
    right, left = gaussian(3, 9, seed=1), gaussian(3, stop - start, seed=2)
    assert free.n_rows == dense.n_rows == stop - start
    torch.testing.assert_close(free.mv(right), dense.mv(right))
    torch.testing.assert_close(free.rmv(left), dense.rmv(left))
    torch.testing.assert_close(free.dense(), dense.dense())
    torch.testing.assert_close(free.gram(torch.float64), dense.gram(torch.float64))


def test_matrix_free_gram_matrix_is_accumulated_in_the_precision_asked_for() -> None:
    matrix = gaussian(5, 300).float()
    gram = matrix_free(matrix).block(0, 5).gram(torch.float64)
    torch.testing.assert_close(gram, matrix.double() @ matrix.double().T, rtol=0, atol=1e-11)


def test_matrix_free_rows_can_be_kept_and_projected() -> None:
    matrix = gaussian(6, 9)
    rows = matrix_free(matrix, block_rows=4)
    kept = rows.keep()
    assert torch.equal(kept.dense(), matrix)
    assert kept.block_rows == 4
    assert rows.costs().held_bytes == 6 * 9 * 8
    directions = ExactDual().apply(ExactDual().prepare(rows), torch.eye(9, dtype=torch.float64)).directions
    torch.testing.assert_close(directions, kernel_projector(matrix))


def test_matrix_free_rows_are_of_the_default_dtype() -> None:
    rows = nb.MatrixFreeRows(lambda v, _: v, lambda v, _: v, n_rows=2, n_columns=2)
    assert rows.dtype == torch.get_default_dtype()


@pytest.mark.parametrize(("n_rows", "n_columns"), [(0, 3), (3, 0)])
def test_matrix_without_rows_or_columns_is_refused(n_rows: int, n_columns: int) -> None:
    with pytest.raises(SettingsError, match="at least one row and one column"):
        nb.MatrixFreeRows(lambda v, _: v, lambda v, _: v, n_rows=n_rows, n_columns=n_columns)


MATRIX = gaussian(6, 9)


def forward(vectors: Tensor, rows: slice) -> Tensor:
    return vectors @ MATRIX[rows].T


def back(vectors: Tensor, rows: slice) -> Tensor:
    return vectors @ MATRIX[rows]


@pytest.mark.parametrize(
    ("jvp", "vjp", "match"),
    [
        (lambda v, rows: 0.0 * forward(v, rows), back, "do not belong to the same matrix"),
        (lambda v, rows: -forward(v, rows), back, "do not belong to the same matrix"),
        (lambda v, rows: math.nan * forward(v, rows), back, "jvp or vjp returns NaN or Inf"),
        (forward, lambda u, rows: 2.0 * back(u, rows), "do not belong to the same matrix"),
        (lambda v, rows: forward(v, rows).T, back, r"jvp must return a tensor of shape \(1, 6\).* not shape \(6, 1\)"),
        (forward, lambda u, rows: back(u, rows).tolist(), r"vjp must return a tensor of shape \(1, 9\).* not list"),
    ],
)  # fmt: skip
def test_products_that_are_not_each_others_transpose_are_refused(jvp: Any, vjp: Any, match: str) -> None:
    """The projectors see the rows through both: a jvp of nothing leaves all noise, with a residual of zero."""
    with pytest.raises(SettingsError, match=match):
        nb.MatrixFreeRows(jvp, vjp, n_rows=6, n_columns=9, dtype=torch.float64, device=MATRIX.device)


@pytest.mark.parametrize("projector", [ExactDual(), Krylov(Alternating(block_rows=2))], ids=["dual", "krylov"])
def test_products_are_cast_to_the_dtype_of_the_rows(projector: Any) -> None:
    rows = nb.MatrixFreeRows(
        lambda v, rows: forward(v.double(), rows), lambda u, rows: back(u.double(), rows), n_rows=6, n_columns=9,
        dtype=torch.float32, device=MATRIX.device,
    )  # fmt: skip
    assert projector.apply(projector.prepare(rows), gaussian(2, 9)).directions.dtype == torch.float32


def test_products_are_compared_in_full_precision() -> None:
    """As the projectors take them: rounded by autocast, those of one row would often seem to be of two matrices."""
    for seed in range(10):
        matrix = gaussian(1, 50, seed=seed).float()
        with torch.autocast(matrix.device.type, dtype=torch.bfloat16):
            matrix_free(matrix)


def test_integer_dtypes_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"not torch.int32: pass dtype=torch.float64"):
        nb.MatrixFreeRows(forward, back, n_rows=6, n_columns=9, dtype=torch.int32)


def test_blocks_of_no_rows_are_refused() -> None:
    with pytest.raises(SettingsError, match="block_rows must be at least 1"):
        nb.DenseRows(torch.eye(3), block_rows=0)
    with pytest.raises(SettingsError, match="block_rows must be at least 1"):
        matrix_free(MATRIX, block_rows=0)
