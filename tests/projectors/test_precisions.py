"""Rows in single and in half precision: what is reached, and an honest account of it."""

import warnings

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.linalg.held import HeldRows
from nullbayes.projectors import Alternating, Krylov, Outcome
from support.drawing import randn
from support.projector_table import (
    CASES,
    PROJECTORS,
    WELL_CONDITIONED,
    compared_with,
    every_pair,
    gaussian,
    oracle,
    pairs,
    smallest,
    unit_rows,
)

# --- float32 ---


@pairs(lambda name, case: case in WELL_CONDITIONED)
def test_float32_rows_give_float32_directions_to_their_precision(name: str, case: str) -> None:
    matrix = CASES[case].matrix.float()
    projector = PROJECTORS[name](1e-3 if name == "Lanczos" else 1e-5)
    noise = gaussian(3, matrix.shape[1])  # float64 noise is taken too
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix, CASES[case].block_rows)), noise)
    assert projection.directions.dtype == torch.float32
    assert projection.info.converged.all()
    if projection.info.rank is not None:
        assert projection.info.rank == CASES[case].rank
    error = projection.directions.double() - noise @ oracle(case)
    rounding = 1e-3 if name == "Sketched" else 1e-5  # which its preconditioner multiplies by one over the shift
    allowed = projector.rtol * (noise @ matrix.double().T).norm(dim=1) + rounding * noise.norm(dim=1)
    assert (error.norm(dim=1) <= allowed).all()


@every_pair
def test_float32_residuals_are_honest(name: str, case: str) -> None:
    matrix = CASES[case].matrix.float()
    projector = PROJECTORS[name](1e-3)
    noise = gaussian(2, matrix.shape[1]).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        projection = projector.apply(projector.prepare(nb.DenseRows(matrix, CASES[case].block_rows)), noise)
    before, after = ((v.double() @ matrix.double().T).norm(dim=1) for v in (noise, projection.directions))
    reference = compared_with(name, matrix, noise)
    torch.testing.assert_close(projection.info.residual * reference, after, rtol=1e-3, atol=1e-5)
    if "truncated" not in name:  # those meet the tolerance in the mean over noise
        assert (after[projection.info.converged] <= 1.01e-3 * before[projection.info.converged]).all()


# --- rows in half precision ---


def halved(matrix: Tensor, block_rows: int) -> HeldRows:
    true = nb.DenseRows(matrix.float(), block_rows)
    return HeldRows(
        [piece.halved() for piece in true.pieces], n_rows=len(matrix), n_columns=matrix.shape[1], like=matrix.float(),
        block_rows=block_rows, reference=true,
    )  # fmt: skip


# rounding makes rows that depend on each other independent: their exact kernel has then little to do with the true one
FAR = ("rows_of_very_different_length", "all_zero")
HALVED = {(name, case) for name in PROJECTORS for case in (*WELL_CONDITIONED, *FAR)}
HALVED -= {("ExactDual", "tall_rank_deficient"), ("ExactPrimal", "tall_rank_deficient")}


@pairs(lambda name, case: (name, case) in HALVED)
def test_projection_of_halved_rows_meets_the_tolerance_on_the_true_ones(name: str, case: str) -> None:
    matrix = CASES[case].matrix
    projector, noise = PROJECTORS[name](1e-2), gaussian(3, matrix.shape[1])
    projection = projector.apply(projector.prepare(halved(matrix, CASES[case].block_rows)), noise)
    assert projection.info.converged.all()
    before, after = (noise @ matrix.T).norm(dim=1), (projection.directions.double() @ matrix.T).norm(dim=1)
    assert (after <= 1.01e-2 * before).all()
    reference = compared_with(name, matrix, noise)
    torch.testing.assert_close(projection.info.residual * reference, after, rtol=1e-3, atol=1e-5)
    unit = unit_rows(matrix)
    if case in WELL_CONDITIONED:
        error = (projection.directions.double() - noise @ oracle(case)).norm(dim=1)
        moved = 2.0**-11 * float(unit.norm()) / smallest(unit)  # of the kernel, by rounding the entries
        assert (error <= 1e-2 * before / smallest(matrix) + 2 * moved * noise.norm(dim=1)).all()


@pairs(lambda name, case: case in ("full_rank", "step", "one_block"))
def test_tolerance_that_halved_rows_cannot_meet_is_reported_as_missed(name: str, case: str) -> None:
    matrix = CASES[case].matrix
    projector, noise = PROJECTORS[name](1e-6), gaussian(3, matrix.shape[1])
    with pytest.warns(ConvergenceWarning):
        projection = projector.apply(projector.prepare(halved(matrix, CASES[case].block_rows)), noise)
    assert not projection.info.converged.any()
    if isinstance(projector, Alternating | Krylov) and case in WELL_CONDITIONED:
        assert projection.info.outcome is Outcome.ROUNDED
    before, after = ((v.double() @ matrix.T).norm(dim=1) for v in (noise, projection.directions))
    reference = compared_with(name, matrix, noise)
    torch.testing.assert_close(projection.info.residual * reference, after, rtol=1e-2, atol=0)
    assert (after > 1e-6 * before).all()


@pytest.mark.parametrize("gram_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("rtol", [1e-3, 1e-2])
@pytest.mark.parametrize("rank", [1, 20, 50])
def test_many_rows_with_few_directions_leave_the_null_space_as_it_is(
    rank: int, rtol: float, gram_dtype: torch.dtype | None
) -> None:
    """The residual does not see the null space, and the largest eigenvalue is a million times the shift."""
    generator = torch.Generator().manual_seed(0)
    left, right = (randn(*shape, generator=generator) for shape in ((10_000, rank), (rank, 600)))
    matrix, noise = left @ right, randn(3, 600, generator=generator)
    projector = Krylov(Alternating(block_rows=10_000, gram_dtype=gram_dtype), rtol=rtol)
    found = projector.apply(projector.prepare(nb.DenseRows(matrix)), noise)
    basis = torch.linalg.qr(right.double().T)[0]
    inside, wide = noise.double() - (noise.double() @ basis) @ basis.T, found.directions.double()
    outside = (wide @ basis) @ basis.T
    torch.testing.assert_close(wide - outside, inside, rtol=0, atol=1e-4)
