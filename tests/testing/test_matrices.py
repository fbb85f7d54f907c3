"""The test matrices have the ranks and spectra they claim; the dense oracles project on their kernels."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes.testing import Case, cases, kernel_dimension, kernel_projector, matrix_from_singular_values

pytestmark = pytest.mark.cpu  # where the matrices are made
BY_NAME = {case.name: case for case in cases()}
PROJECTORS = {"ExactDual", "ExactPrimal", "Alternating", "Krylov", "Lanczos", "Sketched"}

RANKED = {name: case for name, case in BY_NAME.items() if case.rank is not None}

every_case = pytest.mark.parametrize("case", BY_NAME.values(), ids=BY_NAME)
every_ranked_case = pytest.mark.parametrize("case", RANKED.values(), ids=RANKED)


def singular_values(matrix: Tensor) -> Tensor:
    sigma: Tensor = torch.linalg.svdvals(matrix)
    return sigma


def blocks(name: str) -> tuple[Tensor, ...]:
    case = BY_NAME[name]
    return tuple(case.matrix[i : i + case.block_rows] for i in range(0, len(case.matrix), case.block_rows))


# --- every case ---


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(cases()) == 14


@every_case
def test_cases_are_small_float64_matrices_with_a_fitting_block_size(case: Case) -> None:
    n_rows, n_columns = case.matrix.shape
    assert case.matrix.dtype == torch.float64
    assert n_rows <= 120
    assert n_columns <= 160
    assert 1 <= case.block_rows <= n_rows
    assert case.stalls <= PROJECTORS
    assert case.note.endswith(".")


@every_ranked_case
def test_rank_is_separated_by_a_gap(case: Case) -> None:
    assert case.rank is not None
    assert np.linalg.matrix_rank(case.matrix.cpu().numpy()) == case.rank
    sigma = singular_values(case.matrix)
    # Even the Gram matrix, whose eigenvalues are the squares, must see the same rank.
    assert (sigma[: case.rank] > 5e-7 * sigma[0]).all()
    assert (sigma[case.rank :] <= 1e-14 * sigma[0]).all()


def test_cases_are_the_same_at_every_call_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    again = cases()
    assert torch.equal(torch.get_rng_state(), before)
    for case in again:
        assert torch.equal(case.matrix, BY_NAME[case.name].matrix)


def test_a_case_has_a_smaller_last_block() -> None:
    assert any(len(case.matrix) % case.block_rows for case in cases())


# --- each spectrum ---


@pytest.mark.parametrize("name", ["full_rank", "one_block", "more_rows_than_columns"])
def test_well_conditioned_cases_have_singular_values_from_1_to_3(name: str) -> None:
    sigma = singular_values(BY_NAME[name].matrix)
    torch.testing.assert_close(sigma.flip(0), torch.linspace(1, 3, len(sigma)).double())


def test_power_law_has_equal_ratios_over_eight_decades() -> None:
    exponent = singular_values(BY_NAME["power_law"].matrix).log10()
    torch.testing.assert_close(exponent, torch.linspace(0, -8, 100).double(), atol=1e-6, rtol=0)


def test_step_has_two_levels() -> None:
    sigma = singular_values(BY_NAME["step"].matrix)
    torch.testing.assert_close(sigma, torch.tensor([1.0] * 40 + [1e-4] * 40).double(), rtol=1e-7, atol=0)


def test_orthogonal_blocks_are_orthogonal_between_but_not_within() -> None:
    matrix = BY_NAME["orthogonal_blocks"].matrix
    between = matrix @ matrix.T
    for start in range(0, 48, 12):
        within = between[start : start + 12, start : start + 12]
        assert (within - within.diag().diag()).abs().max() > 0.1
        within.zero_()
    assert between.abs().max() < 1e-14


def test_repeated_rows_repeat_within_and_across_blocks() -> None:
    for block in blocks("repeated_rows")[:4]:
        assert len(block.unique(dim=0)) == 5
        assert np.linalg.matrix_rank(block.cpu().numpy()) == 5
    matrix = BY_NAME["repeated_rows"].matrix
    assert torch.equal(matrix[40:], matrix[:40:2])


def test_zero_rows_occur_in_every_block_and_fill_one() -> None:
    assert [int((block == 0).all(dim=1).sum()) for block in blocks("zero_rows")] == [2, 2, 10, 2, 2]


def test_all_zero_is_zero() -> None:
    assert not BY_NAME["all_zero"].matrix.any()


def test_nearly_parallel_blocks_make_the_angles_they_claim() -> None:
    first, second = blocks("nearly_parallel_blocks")
    for block in (first, second):
        torch.testing.assert_close(block @ block.T, torch.eye(25, dtype=torch.float64))
    # The sines of the principal angles: what the first row space leaves of the second.
    sines = singular_values(second - second @ first.T @ first)
    torch.testing.assert_close(sines.asin(), torch.logspace(-1, -3, 25, dtype=torch.float64))


def test_counterexample_is_nearly_orthogonal_in_pairs_and_contracts_slowly() -> None:
    matrix = BY_NAME["paper_rate_counterexample"].matrix
    unit = matrix / matrix.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T).fill_diagonal_(0)
    assert cosines.abs().max() < 19**-0.5
    v = torch.eye(30, dtype=torch.float64)[19]  # e_n, which is no part of the kernel
    for row in unit[[-1, *range(19)]]:
        v = v - (row @ v) * row
    assert float(v.norm()) == pytest.approx(1 / (1 + 0.05**2), rel=1e-12)


def test_rows_of_very_different_length_are_well_conditioned_but_for_their_length() -> None:
    matrix = BY_NAME["rows_of_very_different_length"].matrix
    length = matrix.norm(dim=1)
    assert length.max() / length.min() > 1e5
    assert length.max() / length.min() < 1e7
    sigma = singular_values(matrix / length[:, None])
    assert sigma[0] / sigma[-1] < 5
    assert singular_values(matrix)[0] / singular_values(matrix)[-1] > 1e5


# --- matrix_from_singular_values ---


@pytest.mark.parametrize(("n_rows", "n_columns"), [(5, 9), (9, 5), (3, 3)])
def test_matrix_has_the_singular_values_it_was_given(n_rows: int, n_columns: int) -> None:
    matrix = matrix_from_singular_values([3.0, 0.5, 2.0], n_rows, n_columns, torch.Generator().manual_seed(0))
    assert matrix.shape == (n_rows, n_columns)
    sigma = singular_values(matrix)
    torch.testing.assert_close(sigma[:3], torch.tensor([3.0, 2.0, 0.5]).double())
    assert (sigma[3:] < 1e-14).all()


def test_matrix_depends_on_the_generator() -> None:
    one, same, other = (
        matrix_from_singular_values([1.0, 2.0], 4, 6, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("sigma", [torch.ones(4), torch.ones(2, 2)])
def test_singular_values_that_do_not_fit_are_refused(sigma: Tensor) -> None:
    with pytest.raises(ValueError, match="at most 3 singular values"):
        matrix_from_singular_values(sigma, 3, 8, torch.Generator())


# --- oracles ---


@every_case
def test_oracle_is_the_orthogonal_projector_on_the_kernel(case: Case) -> None:
    projector = kernel_projector(case.matrix)
    assert projector.dtype == torch.float64
    torch.testing.assert_close(projector, projector.T, atol=1e-14, rtol=0)
    torch.testing.assert_close(projector @ projector, projector, atol=1e-13, rtol=0)
    assert (case.matrix @ projector).abs().max() < 1e-13
    assert float(projector.trace()) == pytest.approx(kernel_dimension(case.matrix), abs=1e-11)


@every_ranked_case
def test_kernel_dimension_is_the_number_of_columns_less_the_rank(case: Case) -> None:
    assert case.rank is not None
    assert kernel_dimension(case.matrix) == case.matrix.shape[1] - case.rank


@every_case
def test_oracle_agrees_with_the_pseudo_inverse(case: Case) -> None:
    matrix = case.matrix.cpu().numpy()
    expected = np.eye(matrix.shape[1]) - np.linalg.pinv(matrix, rcond=1e-11) @ matrix
    # A^+ A loses what the smallest singular value asks for: eps times the condition number.
    smallest = {"power_law": 1e-8, "rows_of_very_different_length": 1e-6, "step": 1e-4}.get(case.name, 1e-2)
    np.testing.assert_allclose(kernel_projector(case.matrix).cpu().numpy(), expected, atol=1e-14 / smallest)


def test_rtol_moves_small_singular_values_into_the_kernel() -> None:
    step = BY_NAME["step"].matrix
    assert [kernel_dimension(step, rtol) for rtol in (1e-5, 1e-3, None)] == [40, 80, 40]
    assert float(kernel_projector(step, 1e-3).trace()) == pytest.approx(80)
    assert kernel_dimension(1e-6 * step, 1e-3) == 80  # relative to the largest


def test_rounding_of_a_float32_matrix_does_not_count_as_rank() -> None:
    rounded = BY_NAME["tall_rank_deficient"].matrix.float()
    assert kernel_dimension(rounded) == 30
    assert kernel_dimension(rounded.double()) == 0


def test_a_matrix_without_rows_has_the_whole_space_as_null_space() -> None:
    torch.testing.assert_close(kernel_projector(torch.zeros(0, 4)), torch.eye(4, dtype=torch.float64))
