"""Every projector keeps the same contract on every case: prepare once, apply many times, report the true residual."""

import warnings

import pytest
import torch

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Outcome
from nullbayes.testing import cases
from support import projector_table
from support.projector_table import (
    CASES,
    PROJECTORS,
    RTOL,
    S,
    compared_with,
    every_pair,
    every_projector,
    gaussian,
    oracle,
    pairs,
    rounding,
    smallest,
    solve,
    stalls,
)

# --- what comes back ---


@every_pair
def test_projections_have_the_right_shapes_and_dtypes(name: str, case: str) -> None:
    solved = solve(name, case)
    directions, info = solved.result.directions, solved.result.info
    assert directions.shape == solved.noise.shape
    assert directions.dtype == torch.float64
    assert torch.isfinite(directions).all()
    assert info.projector == type(solved.projector).__name__
    assert info.residual.shape == info.converged.shape == (S,)
    assert info.converged.dtype == torch.bool
    assert info.precision == "float64"


@every_pair
def test_residual_is_that_of_the_directions(name: str, case: str) -> None:
    solved = solve(name, case)
    reference = compared_with(name, solved.case.matrix, solved.noise)
    expected = torch.where(reference > 0, solved.after / reference.clamp_min(1e-300), 0.0)
    torch.testing.assert_close(solved.result.info.residual, expected, rtol=1e-5, atol=1e-14)


@every_pair
def test_converged_means_a_residual_within_the_tolerance(name: str, case: str) -> None:
    info = solve(name, case).result.info
    within = info.residual <= RTOL * (1 + 1e-9)
    assert bool((within | ~info.converged).all())  # but for what rounding leaves of nothing


@every_pair
def test_converged_follows_the_stopping_rule(name: str, case: str) -> None:
    solved = solve(name, case)
    info = solved.result.info
    assert torch.equal(info.converged, solved.after <= RTOL * solved.before)
    assert (info.outcome is Outcome.CONVERGED) == bool(info.converged.all())


@every_pair
def test_a_projection_that_does_not_converge_warns_at_the_line_of_the_caller(name: str, case: str) -> None:
    solved = solve(name, case)
    info = solved.result.info
    if info.outcome is Outcome.CONVERGED:
        assert not solved.warned
    else:
        (warning,) = solved.warned
        assert warning.category is ConvergenceWarning
        assert info.outcome.value in str(warning.message)
        assert f"{int((~info.converged).sum())} of {S} samples" in str(warning.message)
        assert warning.filename == projector_table.__file__


@pairs(lambda name, case: not stalls(name, case))
def test_projection_matches_the_dense_answer(name: str, case: str) -> None:
    solved = solve(name, case)
    assert solved.result.info.converged.all()
    error = solved.result.directions - solved.noise @ oracle(case)
    allowed = RTOL * solved.before / smallest(solved.case.matrix) + rounding(name, case) * solved.noise.norm(dim=1)
    assert (error.norm(dim=1) <= allowed).all()
    if solved.result.info.rank is not None and solved.case.rank is not None:
        assert solved.result.info.rank == solved.case.rank


@pytest.mark.cpu  # at the edge of rounding, where another device may get through
@pairs(stalls)
def test_cases_that_stall_are_the_ones_listed(name: str, case: str) -> None:
    converged = solve(name, case).result.info.converged
    assert not (converged.all() if name.endswith("one block") else converged.any())


@every_pair
def test_the_part_in_the_null_space_is_unchanged_even_where_a_projector_stalls(name: str, case: str) -> None:
    solved = solve(name, case)
    moved = (solved.result.directions - solved.noise) @ oracle(case)
    assert (moved.norm(dim=1) <= rounding(name, case) * solved.noise.norm(dim=1)).all()


@every_pair
def test_null_space_dimension_is_exact_with_a_rank_and_estimated_without(name: str, case: str) -> None:
    solved = solve(name, case)
    info = solved.result.info
    if info.rank is not None:
        assert info.kernel_dimension == solved.noise.shape[1] - info.rank
        assert info.kernel_dimension_stderr == 0
        return
    inner = (solved.noise * solved.result.directions).sum(1)
    traces = solved.noise.shape[1] * inner / solved.noise.square().sum(1)
    assert info.kernel_dimension == pytest.approx(float(traces.mean()), abs=1e-12)
    assert info.kernel_dimension_stderr == pytest.approx(float(traces.std()) / S**0.5, abs=1e-12)
    if not stalls(name, case):
        off = abs(info.kernel_dimension - float(oracle(case).trace()))
        assert off <= 5 * info.kernel_dimension_stderr + 1e-6


@pytest.mark.parametrize("name", ["Alternating", "Krylov"])
def test_standard_error_of_one_sample_is_that_of_a_projector(name: str) -> None:
    case = CASES["full_rank"]
    projector = PROJECTORS[name](RTOL)
    info = projector.apply(projector.prepare(nb.DenseRows(case.matrix, case.block_rows)), gaussian(1, 100)).info
    share = info.kernel_dimension / 100
    assert info.kernel_dimension_stderr == pytest.approx((2 * 100 * share * (1 - share)) ** 0.5)


@pairs(lambda name, case: not stalls(name, case))
def test_callback_gets_increasing_sweeps_and_the_last_residual(name: str, case: str) -> None:
    solved = solve(name, case)
    sweeps = [k for k, _ in solved.calls]
    if solved.result.info.sweeps == 0:
        return  # nothing had to be done
    assert sweeps == sorted(set(sweeps))
    assert sweeps[-1] == solved.result.info.sweeps
    assert torch.equal(solved.calls[-1][1], solved.result.info.residual)


# --- prepare once, apply many ---


@pairs(lambda name, case: not stalls(name, case))
def test_state_can_be_reused_and_nothing_is_overwritten(name: str, case: str) -> None:
    solved = solve(name, case)
    fresh = {case.name: case for case in cases(torch.get_default_device())}[case]
    again = solved.noise.clone()
    projection = solved.projector.apply(solved.state, again)
    assert torch.equal(projection.directions, solved.result.directions)
    assert torch.equal(again, solved.noise)
    assert torch.equal(solved.case.matrix, fresh.matrix)


@pytest.mark.parametrize("case", ["full_rank", "zero_rows", "more_rows_than_columns", "rows_of_very_different_length"])
@every_projector
def test_a_batch_of_samples_gives_what_a_loop_gives(name: str, case: str) -> None:
    matrix, block_rows = CASES[case].matrix, CASES[case].block_rows
    projector = PROJECTORS[name](1e-6)
    state = projector.prepare(nb.DenseRows(matrix, block_rows))
    noise = gaussian(4, matrix.shape[1]) * torch.tensor([[1.0], [1e4], [1e-4], [0.0]])
    noise[2] = noise[2] @ (oracle(case) + 1e-3 * torch.eye(len(noise[2])))  # converges sooner than others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        together = projector.apply(state, noise)
        alone = [projector.apply(state, one[None]) for one in noise]
    tall = len(matrix) > matrix.shape[1]
    loose = name == "Sketched" and tall  # many steps, each of which amplifies the rounding of those before
    apart = 2e-6 * (noise @ matrix.T).norm(dim=1) / smallest(matrix)  # of two results that meet the tolerance
    for i, single in enumerate(alone):
        error = (together.directions[i] - single.directions[0]).norm()
        assert error <= (apart[i] if loose else 1e-12 * noise[i].norm())
        assert together.info.converged[i] == single.info.converged[0]
    assert together.info.sweeps == max(single.info.sweeps for single in alone)
