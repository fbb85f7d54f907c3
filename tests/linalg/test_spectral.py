"""Factors of Gram matrices: pseudo-inverses that decide a rank, shifted inverses that need none."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.linalg.spectral import (
    GramFactor,
    eigh,
    factor_exact,
    factor_shifted,
    factor_truncated,
    leading,
    relative_cutoff,
    right_singular,
)
from nullbayes.testing import kernel_projector
from support.drawing import matrix_from_singular_values, rand, randn, seeded


def well_conditioned(n_rows: int, n_columns: int, rank: int, seed: int = 0) -> Tensor:
    return matrix_from_singular_values(torch.linspace(1, 3, rank), n_rows, n_columns, seeded(seed))


def exact(matrix: Tensor) -> GramFactor:
    return factor_exact(lambda: matrix @ matrix.T, relative_cutoff(len(matrix), matrix.dtype))


def step(matrix: Tensor, factor: GramFactor) -> Tensor:
    """I - B⊤ (G + δD²)⁻¹ B, as a matrix."""
    columns = torch.eye(matrix.shape[1], dtype=matrix.dtype)
    return columns - factor.solve(columns @ matrix.T) @ matrix


DEFICIENT = {
    "full rank": (well_conditioned(12, 20, 12), 12),
    "rank deficient": (well_conditioned(12, 20, 7), 7),
    "more rows than columns": (well_conditioned(15, 8, 8), 8),
    "repeated rows": (well_conditioned(6, 20, 6)[[0, 1, 2, 3, 4, 5, 0, 0, 3]], 6),
    "opposite rows": (torch.cat([well_conditioned(4, 9, 4), -well_conditioned(4, 9, 4)]), 4),
    "zero rows": (well_conditioned(12, 20, 12) * (torch.arange(12) % 3 > 0)[:, None], 8),
    "zero rows and repeated rows": (
        well_conditioned(6, 20, 6)[[0, 1, 2, 3, 4, 5, 0, 3]] * torch.tensor([[1.0]] * 7 + [[0]]),
        6,
    ),
    "nothing but zeros": (torch.zeros(5, 7, dtype=torch.float64), 0),
    "one row": (well_conditioned(1, 4, 1), 1),
}
every_matrix = pytest.mark.parametrize(("matrix", "rank"), DEFICIENT.values(), ids=DEFICIENT)
SCALES = [1e-140, 1e-6, 1.0, 1e6, 1e140]


# --- singular vectors ---


@every_matrix
@pytest.mark.parametrize("scale", SCALES)
def test_right_singular_vectors_are_those_of_numpy(matrix: Tensor, rank: int, scale: float) -> None:
    lengths, basis = right_singular(scale * matrix)
    _, expected, vectors = np.linalg.svd((scale * matrix).cpu().numpy(), full_matrices=False)
    np.testing.assert_allclose(lengths.cpu(), expected, rtol=1e-12, atol=1e-13 * scale)
    identity = torch.eye(len(lengths), dtype=torch.float64)
    torch.testing.assert_close(basis @ basis.T, identity, rtol=0.0, atol=1e-13)
    span = torch.from_numpy(vectors[:rank]).to(basis)
    torch.testing.assert_close(basis[:rank].T @ basis[:rank], span.T @ span, rtol=0.0, atol=1e-12)


# --- eigh ---


@pytest.mark.parametrize("gives_up", [False, True])
def test_eigenvectors_are_found_although_the_solver_of_the_device_gives_up(
    gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, solver, calls = torch.diag(torch.logspace(-18, 3, 30, dtype=torch.float64)), torch.linalg.eigh, []

    def solve(given: Tensor) -> object:
        calls.append(given)
        if gives_up and len(calls) == 1:
            msg = "linalg.eigh: The algorithm failed to converge"
            raise torch.linalg.LinAlgError(msg)
        return solver(given)

    monkeypatch.setattr(torch.linalg, "eigh", solve)
    values, vectors = eigh(matrix)
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix, rtol=1e-7, atol=1e-12)
    assert len(calls) == 1 + gives_up


def test_a_matrix_that_is_not_finite_has_no_eigenvectors() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        eigh(torch.full((3, 3), torch.nan))


# --- factor_exact ---


@every_matrix
def test_exact_factor_solves_like_the_pseudo_inverse(matrix: Tensor, rank: int) -> None:
    factor = exact(matrix)
    assert factor.rank == rank
    # on what the rows can produce: there D⁻¹ (D⁻¹ G D⁻¹)⁺ D⁻¹ acts as G⁺ does, seen through the rows
    images = randn(4, matrix.shape[1], dtype=torch.float64, generator=seeded(1)) @ matrix.T
    expected = (
        images.cpu().numpy()
        @ np.linalg.pinv((matrix @ matrix.T).cpu().numpy(), hermitian=True, rcond=1e-12)
        @ matrix.cpu().numpy()
    )
    np.testing.assert_allclose((factor.solve(images) @ matrix).cpu().numpy(), expected, atol=1e-12)
    torch.testing.assert_close(step(matrix, factor), kernel_projector(matrix), rtol=0, atol=1e-12)


def test_regular_matrix_is_solved_outright() -> None:
    matrix = well_conditioned(9, 9, 9)
    vectors = randn(3, 9, dtype=torch.float64, generator=seeded(1))
    expected = torch.linalg.solve(matrix @ matrix.T, vectors.T).T
    torch.testing.assert_close(exact(matrix).solve(vectors), expected)


@pytest.mark.parametrize("scale", SCALES)
@every_matrix
def test_scale_of_the_rows_does_not_change_the_rank(matrix: Tensor, rank: int, scale: float) -> None:
    mixed = matrix.clone()
    mixed[::2] *= scale
    for rows in (scale * matrix, mixed):
        factor = exact(rows)
        assert factor.rank == rank
        torch.testing.assert_close(step(rows, factor), kernel_projector(matrix), rtol=0, atol=1e-12)


def test_cutoff_decides_the_rank() -> None:
    matrix = matrix_from_singular_values([1.0] * 5 + [1e-3] * 5, 10, 10, seeded())
    matrix = matrix / matrix.norm(dim=1, keepdim=True)
    gram = matrix @ matrix.T
    assert [factor_exact(lambda: gram.clone(), cutoff).rank for cutoff in (1e-10, 1e-4)] == [10, 5]


def test_singular_values_below_rounding_count_as_zero() -> None:
    matrix = matrix_from_singular_values([1.0] * 5 + [1e-9] * 5, 10, 20, seeded())
    assert exact(matrix).rank == 5


def test_rounding_of_float32_rows_does_not_count_as_rank() -> None:
    matrix = matrix_from_singular_values([1.0] * 12 + [3e-7] * 8, 20, 60, seeded())
    gram = matrix @ matrix.T
    assert factor_exact(lambda: gram.clone(), relative_cutoff(20, torch.float32)).rank == 12
    assert factor_exact(lambda: gram.clone(), relative_cutoff(20, torch.float64)).rank == 20


def test_vectors_keep_their_dtype() -> None:
    matrix = well_conditioned(6, 9, 6)
    for factor in (exact(matrix), factor_shifted(lambda: matrix @ matrix.T, torch.float32)):
        assert factor.solve(torch.ones(2, 6)).dtype == torch.float32
        assert factor.solve(torch.ones(2, 6).double()).dtype == torch.float64


# --- factor_shifted ---


@pytest.mark.parametrize("scale", [*SCALES, None], ids=str)
@every_matrix
def test_shifted_step_is_a_contraction_whose_fixed_points_are_the_kernel(
    matrix: Tensor, rank: int, scale: float | None
) -> None:
    rows = matrix * (10 ** (12 * rand(len(matrix), 1, generator=seeded(3)).double() - 6) if scale is None else scale)
    factor = factor_shifted(lambda: rows @ rows.T, torch.float64)
    assert factor.rank is None
    assert 0 < factor.shift < 1e-12
    once = step(rows, factor)
    torch.testing.assert_close(once, once.T, rtol=0, atol=1e-9)
    values = torch.linalg.eigvalsh((once + once.T) / 2)
    assert values.min() > -1e-9
    assert values.max() < 1 + 1e-9
    kernel = kernel_projector(matrix)
    torch.testing.assert_close(once @ kernel, kernel, rtol=0, atol=1e-12)
    assert int((values > 0.5).sum()) == matrix.shape[1] - rank


def test_shift_grows_until_a_rounded_gram_matrix_can_be_factored() -> None:
    gram = torch.ones(40, 40)
    gram[0, 1] = gram[1, 0] = 1 + 1e-3  # indefinite, as accumulation in float32 may leave it
    factor = factor_shifted(lambda: gram, torch.float32)
    assert 1e-4 < factor.shift < 1e-1
    assert torch.isfinite(factor.solve(torch.ones(1, 40))).all()


def test_float32_factor_contracts_too() -> None:
    matrix = well_conditioned(30, 50, 20).float()
    factor = factor_shifted(lambda: matrix @ matrix.T, torch.float32)
    values = torch.linalg.eigvalsh(step(matrix.double(), factor))
    assert values.min() > -1e-2
    assert values.max() < 1 + 1e-5
    assert factor.shift >= 8 * 30**0.5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_matrix_is_refused(value: float) -> None:
    gram = torch.eye(3, dtype=torch.float64)
    gram[1, 1] = value
    for factor in (
        lambda: factor_shifted(lambda: gram.clone(), torch.float64),
        lambda: factor_exact(lambda: gram.clone(), 1e-12),
        lambda: factor_truncated(gram.clone(), 1e-2, 1e-12),
    ):
        with pytest.raises(NullBayesError, match="NaN or Inf"):
            factor()


# --- truncation ---


def test_leading_keeps_the_fewest_eigenvectors_that_meet_a_third_of_the_tolerance() -> None:
    values = torch.tensor([0.0, 1e-8, 1e-6, 1.0, 1.0]).double()  # ascending; a sum of about 2
    even = torch.ones(5).double()
    for rtol, start in [(1e-5, 1), (1e-3, 2), (1e-2, 3), (0.9, 3)]:
        assert leading(values, values, rtol) == start
    assert leading(values, even, 1e-2) == 0  # both measures have to allow it
    assert leading(even, values, 1e-2) == 0


def test_truncated_factor_removes_eigenvectors_or_leaves_them_whole() -> None:
    matrix = matrix_from_singular_values([1.0, 0.5, 1e-3, 1e-4], 4, 9, seeded())
    unit = matrix / matrix.norm(dim=1, keepdim=True)
    factor = factor_truncated(unit @ unit.T, 1e-2, 1e-14)
    kept = torch.linalg.svd(unit).Vh[2:]
    assert factor.rank == 2
    torch.testing.assert_close(step(unit, factor), kept.T @ kept, rtol=0, atol=1e-9)


def test_truncated_factor_holds_no_more_than_the_cutoff_allows() -> None:
    matrix = well_conditioned(12, 20, 7)
    assert factor_truncated(matrix @ matrix.T, 1e-15, relative_cutoff(12, torch.float64)).rank == 7
    assert factor_truncated(torch.zeros(3, 3).double(), 1e-2, 1e-12).rank == 0
