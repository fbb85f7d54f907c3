"""A step of a sweep is a symmetric map with eigenvalues in [0, 1), zero exactly on the null space of its block."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import NullBayesError
from nullbayes.linalg.held import HeldBlock
from nullbayes.linalg.spectral import NormalFactor, factor_normal
from nullbayes.projectors import Alternating, Krylov
from nullbayes.projectors.sweep import DualStep, dual_step, gram_precision, primal_step
from nullbayes.testing import cases, kernel_projector
from support.drawing import matrix_from_singular_values, rand, randn, seeded

CASES = {case.name: case for case in cases(torch.get_default_device())}
every_case = pytest.mark.parametrize("case", CASES)
shifts = pytest.mark.parametrize("shift", [1e-4, 5e-3, 0.5])


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=torch.float64, generator=seeded(seed))


def dual(matrix: Tensor, shift: float, precision: torch.dtype | None = None) -> DualStep:
    return dual_step(nb.DenseRows(matrix), 0, len(matrix), precision=precision, shift=shift)


def primal(matrix: Tensor, shift: float) -> NormalFactor:
    return primal_step(nb.DenseRows(matrix), shift=shift)


Make = Callable[[Tensor, float], DualStep | NormalFactor]


def as_matrix(step: DualStep | NormalFactor, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return step.correction(torch.eye(columns, dtype=dtype)).T.double()


def written_out(matrix: Tensor, shift: float) -> Tensor:
    """The map of the rows scaled to unit length, by their singular values."""
    lengths = matrix.norm(dim=1, keepdim=True)
    _, sigma, right = torch.linalg.svd(matrix / torch.where(lengths > 0, lengths, 1.0), full_matrices=False)
    return right.T * (sigma**2 / (sigma**2 + shift)) @ right


@shifts
@every_case
def test_both_steps_are_the_same_map(case: str, shift: float) -> None:
    matrix = CASES[case].matrix
    expected = written_out(matrix, shift)
    for step in (dual(matrix, shift), primal(matrix, shift)):
        assert getattr(step, "factor", step).shift == shift
        torch.testing.assert_close(as_matrix(step, matrix.shape[1]), expected, rtol=0, atol=1e-8)


@shifts
@pytest.mark.parametrize("make", [dual, primal])
@every_case
def test_map_is_symmetric_with_eigenvalues_below_one_and_zero_on_the_null_space_alone(
    case: str, make: Make, shift: float
) -> None:
    matrix = CASES[case].matrix
    map_ = as_matrix(make(matrix, shift), matrix.shape[1])
    torch.testing.assert_close(map_, map_.T, rtol=0, atol=1e-9)
    values = torch.linalg.eigvalsh((map_ + map_.T) / 2)
    assert values.min() > -1e-9
    assert values.max() < 1
    lengths = matrix.norm(dim=1, keepdim=True)
    kernel = kernel_projector(matrix / torch.where(lengths > 0, lengths, 1.0))
    assert torch.linalg.matrix_norm(map_ @ kernel, 2) < 1e-8
    if CASES[case].rank is not None and case not in ("step", "nearly_parallel_blocks"):  # those have tiny ones
        assert int((values > 1e-3).sum()) == CASES[case].rank


@pytest.mark.parametrize("make", [dual, primal])
@pytest.mark.parametrize("shape", [(20, 50), (50, 20)], ids=["wide", "tall"])
def test_float32_rows_give_the_same_map_to_their_precision(shape: tuple[int, int], make: Make) -> None:
    matrix = matrix_from_singular_values(torch.linspace(1, 3, 15), *shape, seeded()).float()
    map_ = as_matrix(make(matrix, 5e-3), shape[1], torch.float32)
    torch.testing.assert_close(map_, written_out(matrix.double(), 5e-3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [dual, primal])
def test_length_of_the_rows_does_not_change_the_map(make: Make) -> None:
    matrix = matrix_from_singular_values(torch.linspace(1, 3, 10), 12, 11, seeded())
    scaled = matrix * 10 ** (12 * rand(12, 1, dtype=torch.float64, generator=seeded(1)) - 6)
    torch.testing.assert_close(as_matrix(make(scaled, 1e-3), 11), as_matrix(make(matrix, 1e-3), 11), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(9, 9), (9, 8), (8, 9)], ids=str)
def test_all_rows_in_one_block_use_the_smaller_matrix(shape: tuple[int, int]) -> None:
    rows = nb.DenseRows(gaussian(*shape))
    (step,) = Alternating().prepare(rows).steps
    assert isinstance(step, NormalFactor if shape[0] > shape[1] else DualStep)
    many = Alternating(block_rows=4).prepare(rows).steps
    assert len(many) > 1
    assert all(isinstance(step, DualStep) for step in many)


def test_default_shift_is_half_the_tolerance_of_the_outer_projector() -> None:
    rows = nb.DenseRows(gaussian(6, 9))
    assert Alternating(rtol=1e-3).prepare(rows).steps[0].factor.shift == 5e-4
    assert Krylov(Alternating(rtol=1e-3), rtol=1e-2).prepare(rows).steps[0].factor.shift == 5e-3
    assert Krylov(Alternating(shift=0.1), rtol=1e-2).prepare(rows).steps[0].factor.shift == 0.1
    assert 0 < Alternating(shift=0.0).prepare(rows).steps[0].factor.shift < 1e-12  # what rounding asks for


# --- precision ---


def test_precision_of_a_gram_matrix_follows_rows_size_and_device() -> None:
    here = torch.get_default_device()
    assert gram_precision(torch.float32, here, 1000) == torch.float64
    assert gram_precision(torch.float64, here, 10_000) == torch.float64
    if here.type == "cpu":
        assert gram_precision(torch.float32, here, 1001) == torch.float32


def rough_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding makes nearly equal rows less equal in their Gram matrix: a step then goes too far."""
    accurate = HeldBlock.gram

    def rough(block: HeldBlock, dtype: torch.dtype) -> Tensor:
        gram = accurate(block, dtype)
        return gram if dtype == torch.float64 else 0.4 * gram + 0.6 * gram.diagonal().diag()

    monkeypatch.setattr(HeldBlock, "gram", rough)


def test_float32_factor_that_would_overshoot_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = (gaussian(1, 50) + 0.1 * gaussian(10, 50, seed=1)).float()
    assert dual(matrix, 0.0, torch.float32).precision == torch.float32
    rough_gram(monkeypatch)
    step = dual(matrix, 0.0, torch.float32)
    assert step.precision == torch.float64
    assert torch.linalg.matrix_norm(as_matrix(step, 50, torch.float32), 2) < 1.001


def test_sweeps_with_a_replaced_factor_do_not_diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    rough_gram(monkeypatch)
    matrix = (gaussian(1, 50) + 0.1 * gaussian(10, 50, seed=1)).float()
    noise = gaussian(3, 50).float()
    projector = Alternating(gram_dtype=torch.float32, rtol=1e-4, shift=0.0)
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix, 10)), noise)
    assert projection.info.converged.all()
    assert (projection.directions.norm(dim=1) <= noise.norm(dim=1)).all()


@pytest.mark.parametrize("n_rows", [20, 200, 1100])
def test_float32_factors_of_nearly_equal_rows_do_not_overshoot(n_rows: int) -> None:
    matrix = (gaussian(1, 1200) + 1e-3 * gaussian(n_rows, 1200, seed=1)).float()
    step = dual(matrix, 0.0, torch.float32)
    vectors = gaussian(4, n_rows).float() @ matrix
    for _ in range(20):
        vectors = step.correction(vectors / vectors.norm(dim=1, keepdim=True))
    assert vectors.norm(dim=1).max() < 1.01


# --- the normal matrix ---


def test_rounding_of_the_normal_factor_stays_within_its_bound() -> None:
    """What a step takes from a vector in the kernel is no more than the factor says."""
    for scale in (1.0, 30.0, 1000.0):  # of the largest eigenvalue: many equal rows
        matrix = matrix_from_singular_values([scale] + [1.0] * 19, 60, 40, seeded(3))
        rows = nb.DenseRows(matrix)
        factor = factor_normal(lambda: matrix.T @ matrix, torch.float64)  # noqa: B023 - called at once
        inside = gaussian(5, 40) @ kernel_projector(rows.dense())
        taken = factor.correction(inside) @ kernel_projector(rows.dense())
        assert 0 < factor.leak <= 1.001e-10
        assert (taken.norm(dim=1) <= 4 * factor.leak * inside.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("shift", [0.0, 1e-12, None])
def test_conjugate_gradients_by_the_normal_matrix_do_not_amplify_rounding(
    shift: float | None, dtype: torch.dtype
) -> None:
    """Below the rounding of its factor, a gradient is any vector in the kernel, and a step along it any length."""
    matrix = matrix_from_singular_values(torch.linspace(1, 3, 20), 90, 60, seeded(3))
    kernel, noise = kernel_projector(matrix), gaussian(4, 60)
    projector = Krylov(Alternating(shift=shift), rtol=1e-11 if dtype == torch.float64 else 1e-6)
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix.to(dtype))), noise)
    assert projection.info.converged.all()
    error = (projection.directions.double() - noise @ kernel).norm(dim=1)
    assert (error <= (1e-8 if dtype == torch.float64 else 1e-4) * noise.norm(dim=1)).all()


@pytest.mark.parametrize("shift", [0.0, 5e-3])
def test_zero_rows_remove_nothing(shift: float) -> None:
    for make in (dual, primal):
        assert as_matrix(make(torch.zeros(5, 3, dtype=torch.float64), shift), 3).abs().max() < 1e-15


@pytest.mark.parametrize("value", [float("nan"), 1e200], ids=["nan", "squares overflow"])
def test_rows_without_a_normal_matrix_are_refused(value: float) -> None:
    rows = nb.DenseRows(torch.zeros(7, 3, dtype=torch.float64))
    rows.pieces[0].tensors()[0].fill_(value)  # it would refuse NaN itself
    for projector in (Krylov(), Alternating(), nb.projectors.ExactPrimal()):
        with pytest.raises(NullBayesError, match="NaN or Inf"):
            projector.prepare(rows)


def test_shift_of_the_normal_matrix_grows_until_it_can_be_factored() -> None:
    matrix = torch.ones(6, 6, dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = 1.1  # indefinite
    factor = factor_normal(lambda: matrix.clone(), torch.float64)
    assert 1e-3 < factor.shift < 1
    assert torch.isfinite(factor.correction(torch.ones(1, 6, dtype=torch.float64))).all()


@pytest.mark.parametrize("shift", [-1.0, float("inf"), float("nan")])
def test_shifts_that_are_not_finite_are_refused(shift: float) -> None:
    with pytest.raises(nb.errors.SettingsError, match="shift must be a number of at least 0"):
        Alternating(shift=shift)
