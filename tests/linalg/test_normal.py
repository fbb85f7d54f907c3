"""The normal matrix of rows in every mixture of pieces, and a Cholesky factor in the place of a matrix."""

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.linalg.held import HeldBlock, HeldRows
from nullbayes.linalg.normal import normal_matrix
from support.drawing import rand
from support.layouts import MIXTURES, gaussian, layout
from support.limited import limited

every_mixture = pytest.mark.parametrize("kind", MIXTURES)


def weighted(matrix: Tensor, scale: Tensor | None) -> Tensor:
    """The same, in one line."""
    return matrix.T @ matrix if scale is None else matrix.T @ (scale.square()[:, None] * matrix)


def weights(n: int) -> Tensor:
    return 0.5 + rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_normal(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == torch.float64
    assert torch.equal(result, result.T)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13 * float(expected.abs().max() + 1))


# --- the normal matrix ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("outputs", [1, 3])
@every_mixture
def test_normal_matrix_matches_the_dense_matrix(kind: str, outputs: int, order: int, dtype: torch.dtype) -> None:
    found = layout(kind, outputs=outputs, order=order, dtype=dtype)
    rows, scale = found.rows(), weights(len(found.matrix))
    assert_normal(normal_matrix(rows), weighted(found.matrix, None))
    assert_normal(normal_matrix(rows, scale), weighted(found.matrix, scale))


@every_mixture
def test_rows_of_weight_zero_do_not_count(kind: str) -> None:
    found = layout(kind)
    scale = weights(21)
    scale[::2] = 0
    assert_normal(normal_matrix(found.rows(), scale), weighted(found.matrix[1::2], scale[1::2]))
    assert not normal_matrix(found.rows(), torch.zeros_like(scale)).any()


@every_mixture
def test_rows_that_are_zero_stay_zero(kind: str) -> None:
    found = layout(kind)
    for piece in found.pieces:
        for tensor in piece.tensors():
            tensor.zero_()
    assert not normal_matrix(found.rows(), weights(21)).any()


@pytest.mark.parametrize("n", [1, 2, 7])
@every_mixture
def test_normal_matrix_is_right_for_one_example_and_more(kind: str, n: int) -> None:
    found = layout(kind, n=n, order=1)
    assert_normal(normal_matrix(found.rows(), weights(3 * n)), weighted(found.matrix, weights(3 * n)))


@pytest.mark.parametrize("block_rows", [3, 6, 9])
@every_mixture
def test_normal_matrices_of_blocks_add_up(kind: str, block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldRows, "rows_per_normal_pass", block_rows)
    found = layout(kind, order=2)
    assert_normal(normal_matrix(found.rows(), weights(21)), weighted(found.matrix, weights(21)))


@pytest.mark.parametrize("room", [1, 2000])
@every_mixture
def test_normal_matrix_is_summed_over_chunks_of_examples(kind: str, room: int) -> None:
    found = layout(kind, order=3)
    rows = found.rows()
    rows.working_bytes = room
    assert_normal(normal_matrix(rows, weights(21)), weighted(found.matrix, weights(21)))


@pytest.mark.parametrize("panel", [1, 3, 8, 100])
def test_upper_triangle_is_copied_a_panel_at_a_time(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, mirrored_columns=panel)
    found = layout("everything", order=1)
    assert_normal(normal_matrix(found.rows()), weighted(found.matrix, None))


def test_columns_that_no_piece_has_are_zero() -> None:
    found = layout("with gaps")
    result = normal_matrix(found.rows())
    empty = ~found.matrix.any(0)
    assert int(empty.sum()) == 7
    assert not result[empty].any()
    assert not result[:, empty].any()


def test_matrix_free_rows_have_a_normal_matrix() -> None:
    matrix = gaussian(9, 5)
    rows = nb.MatrixFreeRows(
        lambda v, where: v @ matrix[where].T, lambda u, where: u @ matrix[where], n_rows=9, n_columns=5,
        dtype=torch.float64, device=matrix.device,
    )  # fmt: skip
    assert_normal(normal_matrix(rows, weights(9)), weighted(matrix, weights(9)))


@pytest.mark.parametrize("outputs", [1, 3])
@every_mixture
def test_norms_match_the_rows(kind: str, outputs: int) -> None:
    found = layout(kind, outputs=outputs, order=1, dtype=torch.float32)
    lengths = found.rows().lengths()
    assert lengths.dtype == torch.float64
    torch.testing.assert_close(lengths, found.matrix.norm(dim=1), rtol=1e-12, atol=0)


def test_norms_are_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldRows, "rows_per_pass", 6)
    found = layout("everything")
    torch.testing.assert_close(found.rows().lengths(), found.matrix.norm(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_norms_whose_squares_overflow_float32_are_right(size: float) -> None:
    matrix = (size * gaussian(3, 5)).float()
    torch.testing.assert_close(nb.DenseRows(matrix).lengths(), matrix.double().norm(dim=1), rtol=1e-12, atol=0)


def test_factors_of_a_block_multiply_to_its_rows() -> None:
    found = layout("everything", order=1)
    block = found.rows().block(3, 12)
    assert isinstance(block, HeldBlock)
    entries = torch.zeros(9, found.matrix.shape[1], dtype=torch.float64)
    for gradients, activations, column in block.factors():
        tall = gradients[..., None] if activations is None else gradients[..., None] * activations[:, None, None, :]
        tall = tall.reshape(9, -1)
        entries[:, column : column + tall.shape[1]] += tall
    torch.testing.assert_close(entries, found.matrix[3:12])
