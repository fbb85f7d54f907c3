"""Every projector keeps the same promises on every case: prepare once, apply many times, an honest account of it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from drawing import randn
from nullbayes.errors import ConvergenceWarning, NullBayesError, SettingsError
from nullbayes.linalg.held import HeldRows
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos, Outcome, Projection, Projector
from nullbayes.projectors.base import mean_and_error, traces
from nullbayes.testing import Case, cases, kernel_projector

RTOL = 1e-8
S = 5
CASES = {case.name: case for case in cases(torch.get_default_device())}
PROJECTORS: dict[str, Callable[[float], Projector]] = {
    "ExactDual": lambda rtol: ExactDual(rtol=rtol),
    "ExactDual, truncated": lambda rtol: ExactDual(truncate=True, rtol=rtol),
    "ExactPrimal": lambda rtol: ExactPrimal(rtol=rtol),
    "ExactPrimal, truncated": lambda rtol: ExactPrimal(truncate=True, rtol=rtol),
    "Alternating": lambda rtol: Alternating(rtol=rtol),
    "Krylov": lambda rtol: Krylov(rtol=rtol),
    "Alternating, shifted": lambda rtol: Alternating(rtol=rtol, shift=1e-2),
    "Krylov, shifted": lambda rtol: Krylov(Alternating(shift=1e-2), rtol=rtol),
    "Alternating, coarse": lambda rtol: Alternating(rtol=rtol, coarse=8),
    "Krylov, coarse": lambda rtol: Krylov(Alternating(coarse=8), rtol=rtol),
    "Alternating, one block": lambda rtol: Alternating(rtol=rtol, block_rows=1000),
    "Krylov, one block": lambda rtol: Krylov(Alternating(block_rows=1000), rtol=rtol),
    "Lanczos": lambda rtol: Lanczos(rtol=rtol),
}
WELL_CONDITIONED = (
    "full_rank", "orthogonal_blocks", "repeated_rows", "zero_rows", "single_row", "one_block", "more_rows_than_columns",
    "tall_rank_deficient",
)  # fmt: skip


def stalls(name: str, case: str) -> bool:
    if name.endswith("one block"):
        return case == "power_law"  # no angles between blocks to be slow at; rounding is left
    return name.split(",")[0] in CASES[case].stalls


def pairs(keep: Callable[[str, str], bool] = lambda name, case: True) -> pytest.MarkDecorator:
    """All projectors on all cases that are kept."""
    kept = [(name, case) for name in PROJECTORS for case in CASES if keep(name, case)]
    return pytest.mark.parametrize(("name", "case"), kept, ids=[f"{name}-{case}" for name, case in kept])


every_pair = pairs()
every_projector = pytest.mark.parametrize("name", PROJECTORS)


@dataclass(frozen=True)
class Solved:
    case: Case
    projector: Projector
    state: object
    noise: Tensor
    result: Projection
    warned: list[warnings.WarningMessage]
    calls: list[tuple[int, Tensor]]

    @property
    def before(self) -> Tensor:
        return (self.noise @ self.case.matrix.T).norm(dim=1)

    @property
    def after(self) -> Tensor:
        return (self.result.directions @ self.case.matrix.T).norm(dim=1)


def gaussian(n: int, columns: int, seed: int = 0) -> Tensor:
    return randn(n, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cache
def solve(name: str, case_name: str) -> Solved:
    case = CASES[case_name]
    projector = PROJECTORS[name](RTOL)
    state = projector.prepare(nb.DenseRows(case.matrix, case.block_rows))
    noise = gaussian(S, case.matrix.shape[1])
    calls: list[tuple[int, Tensor]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = projector.apply(state, noise.clone(), callback=lambda k, r: calls.append((k, r.clone())))
    return Solved(case, projector, state, noise, result, warned, calls)


def unit_rows(matrix: Tensor) -> Tensor:
    lengths = matrix.norm(dim=1, keepdim=True)
    return matrix / torch.where(lengths > 0, lengths, 1.0)


@cache
def oracle(case_name: str) -> Tensor:
    """The dense projector; from unit rows, which have the same kernel and the better condition."""
    return kernel_projector(unit_rows(CASES[case_name].matrix))


def smallest(matrix: Tensor) -> float:
    """The smallest singular value that is not rounding."""
    sigma = torch.linalg.svdvals(matrix)
    return float(sigma[sigma > 1e-13 * sigma[0]][-1]) if sigma[0] > 0 else 1.0


@cache
def condition(case_name: str) -> float:
    unit = unit_rows(CASES[case_name].matrix)
    return float(torch.linalg.matrix_norm(unit, 2)) / smallest(unit)


def rounding(name: str, case_name: str, eps: float = 2.0**-52) -> float:
    """What rounding may put into the kernel, relative to the noise."""
    if name == "Lanczos":
        return 1e4 * eps**0.5
    tall = len(CASES[case_name].matrix) > CASES[case_name].matrix.shape[1]
    if name.endswith("one block") and tall:  # by the factor of the normal matrix, which is allowed that much
        return 2 * max(8 * eps, 1e-10)
    power = 2 if name.startswith("ExactPrimal") else 1  # the eigenvectors of A⊤A see the squared condition
    return min(1e3 * eps * condition(case_name) ** power, 1e-2)


# --- what comes back ---


@every_pair
def test_shapes_and_dtypes(name: str, case: str) -> None:
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
    expected = torch.where(solved.before > 0, solved.after / solved.before.clamp_min(1e-300), 0.0)
    torch.testing.assert_close(solved.result.info.residual, expected, rtol=1e-5, atol=1e-14)


@every_pair
def test_converged_is_the_stopping_sentence(name: str, case: str) -> None:
    solved = solve(name, case)
    info = solved.result.info
    assert torch.equal(info.converged, solved.after <= RTOL * solved.before)
    assert (info.outcome is Outcome.CONVERGED) == bool(info.converged.all())


@every_pair
def test_whoever_asked_is_warned_unless_it_converged(name: str, case: str) -> None:
    solved = solve(name, case)
    info = solved.result.info
    if info.outcome is Outcome.CONVERGED:
        assert not solved.warned
    else:
        (warning,) = solved.warned
        assert warning.category is ConvergenceWarning
        assert info.outcome.value in str(warning.message)
        assert f"{int((~info.converged).sum())} of {S} samples" in str(warning.message)
        assert warning.filename == __file__


@pairs(lambda name, case: not stalls(name, case))
def test_projection_is_the_oracles(name: str, case: str) -> None:
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
def test_kernel_is_untouched_even_where_it_stalls(name: str, case: str) -> None:
    solved = solve(name, case)
    moved = (solved.result.directions - solved.noise) @ oracle(case)
    assert (moved.norm(dim=1) <= rounding(name, case) * solved.noise.norm(dim=1)).all()


@every_pair
def test_kernel_dimension_is_exact_with_a_rank_and_estimated_without(name: str, case: str) -> None:
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
def test_callback_is_told_of_growing_sweeps_and_the_last_residual(name: str, case: str) -> None:
    solved = solve(name, case)
    sweeps = [k for k, _ in solved.calls]
    if solved.result.info.sweeps == 0:
        return  # nothing had to be done
    assert sweeps == sorted(set(sweeps))
    assert sweeps[-1] == solved.result.info.sweeps
    assert torch.equal(solved.calls[-1][1], solved.result.info.residual)


# --- prepare once, apply many ---


@pairs(lambda name, case: not stalls(name, case))
def test_state_is_not_used_up_and_nothing_is_overwritten(name: str, case: str) -> None:
    solved = solve(name, case)
    fresh = {case.name: case for case in cases(torch.get_default_device())}[case]
    again = solved.noise.clone()
    projection = solved.projector.apply(solved.state, again)
    assert torch.equal(projection.directions, solved.result.directions)
    assert torch.equal(again, solved.noise)
    assert torch.equal(solved.case.matrix, fresh.matrix)


@pytest.mark.parametrize("case", ["full_rank", "zero_rows", "more_rows_than_columns", "rows_of_very_different_length"])
@every_projector
def test_batch_is_a_loop(name: str, case: str) -> None:
    matrix, block_rows = CASES[case].matrix, CASES[case].block_rows
    projector = PROJECTORS[name](1e-6)
    state = projector.prepare(nb.DenseRows(matrix, block_rows))
    noise = gaussian(4, matrix.shape[1]) * torch.tensor([[1.0], [1e4], [1e-4], [0.0]])
    noise[2] = noise[2] @ (oracle(case) + 1e-3 * torch.eye(len(noise[2])))  # converges sooner than others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        together = projector.apply(state, noise)
        alone = [projector.apply(state, one[None]) for one in noise]
    for i, single in enumerate(alone):
        error = (together.directions[i] - single.directions[0]).norm()
        assert error <= 1e-12 * noise[i].norm()
        assert together.info.converged[i] == single.info.converged[0]
    assert together.info.sweeps == max(single.info.sweeps for single in alone)


# --- the edges ---


@pytest.mark.parametrize("case", ["full_rank", "zero_rows", "all_zero", "power_law"])
@every_projector
def test_zero_noise_gives_zero_directions(name: str, case: str) -> None:
    matrix = CASES[case].matrix
    projector = PROJECTORS[name](RTOL)
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix, 10)), torch.zeros(2, matrix.shape[1]))
    assert torch.equal(projection.directions, torch.zeros(2, matrix.shape[1], dtype=torch.float64))
    assert torch.equal(projection.info.residual, torch.zeros(2, dtype=torch.float64))
    assert projection.info.converged.all()


@every_projector
def test_rows_of_zeros_return_the_noise_itself(name: str) -> None:
    solved = solve(name, "all_zero")
    assert torch.equal(solved.result.directions, solved.noise)
    assert solved.result.info.rank in (0, None)


@every_projector
def test_empty_kernel_leaves_nothing(name: str) -> None:
    solved = solve(name, "more_rows_than_columns")
    assert (solved.result.directions.norm(dim=1) <= 1e-7 * solved.noise.norm(dim=1)).all()
    assert abs(solved.result.info.kernel_dimension) < 1e-6


@every_projector
def test_noise_in_the_kernel_stays(name: str) -> None:
    matrix = CASES["one_block"].matrix
    inside = gaussian(2, 80) @ oracle("one_block")
    projector = Lanczos(rank=10) if name == "Lanczos" else PROJECTORS[name](RTOL)
    state = projector.prepare(nb.DenseRows(matrix, 12))
    projection = projector.apply(state, inside)
    torch.testing.assert_close(projection.directions, inside, rtol=0, atol=1e-12)
    assert projection.info.converged.all()  # what is left of A noise is rounding: there was nothing to remove


@every_projector
def test_absolute_tolerance_counts_too(name: str) -> None:
    case = CASES["power_law"]
    projector = PROJECTORS[name](RTOL)
    loose = type(projector)(rtol=0.0, atol=1e3)
    projection = loose.apply(loose.prepare(nb.DenseRows(case.matrix, 20)), gaussian(2, 150))
    assert projection.info.outcome is Outcome.CONVERGED


@pytest.mark.parametrize("name", ["Alternating", "Krylov"])
def test_noise_within_the_absolute_tolerance_is_left_alone(name: str) -> None:
    projector = {"Alternating": Alternating, "Krylov": Krylov}[name](rtol=0.0, atol=1e3)
    noise = gaussian(2, 100)
    projection = projector.apply(projector.prepare(nb.DenseRows(CASES["full_rank"].matrix, 16)), noise)
    assert torch.equal(projection.directions, noise)
    assert projection.info.sweeps == 0


@pytest.mark.parametrize(
    "noise",
    [
        torch.zeros(3, 99),
        torch.zeros(100),
        torch.zeros(1, 3, 100),
        torch.zeros(0, 100),
        torch.full((2, 100), float("nan")),
        torch.full((2, 100), float("inf")),
    ],
    ids=["columns", "vector", "three dimensions", "no samples", "nan", "inf"],
)
@every_projector
def test_noise_that_cannot_be_projected_is_refused(name: str, noise: Tensor) -> None:
    solved = solve(name, "full_rank")
    with pytest.raises(SettingsError, match="noise"):
        solved.projector.apply(solved.state, noise)


@pytest.mark.parametrize(
    "settings",
    [{"rtol": 1.0}, {"rtol": -1e-3}, {"rtol": float("nan")}, {"atol": -1.0}, {"rtol": 0.0, "atol": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("kind", [ExactDual, ExactPrimal, Alternating, Krylov, Lanczos])
def test_tolerances_that_make_no_sense_are_refused(kind: type[Projector], settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="rtol"):
        kind(**settings)


@pytest.mark.parametrize("block_rows", [0, -3])
def test_empty_blocks_are_refused(block_rows: int) -> None:
    with pytest.raises(SettingsError, match="block_rows must be at least 1"):
        Alternating(block_rows=block_rows)


@pytest.mark.parametrize("kind", [Alternating, Krylov])
def test_no_sweeps_at_all_are_refused(kind: type[Alternating] | type[Krylov]) -> None:
    with pytest.raises(SettingsError, match="max_sweeps must be at least 1"):
        kind(max_sweeps=0)


@pytest.mark.parametrize("cutoff", [-1.0, 1.0, 2.0, float("nan")])
@pytest.mark.parametrize("kind", [ExactDual, ExactPrimal])
def test_cuts_that_keep_nothing_are_refused(kind: type[ExactDual] | type[ExactPrimal], cutoff: float) -> None:
    with pytest.raises(SettingsError, match="0 <= cutoff < 1"):
        kind(cutoff=cutoff)


@pytest.mark.parametrize("rank", [0, -1])
def test_empty_bases_are_refused(rank: int) -> None:
    with pytest.raises(SettingsError, match="rank must be at least 1"):
        Lanczos(rank=rank)


@pytest.mark.parametrize("value", [float("nan"), 1e200], ids=["nan", "squares overflow"])
@pytest.mark.parametrize("kind", [ExactDual, Alternating, Krylov])
def test_rows_without_a_gram_matrix_are_refused(kind: type[Projector], value: float) -> None:
    rows = nb.DenseRows(torch.zeros(4, 7, dtype=torch.float64), block_rows=2)
    rows.pieces[0].tensors()[0].fill_(value)  # it would refuse NaN itself
    with pytest.raises(NullBayesError, match="NaN or Inf"):
        kind().prepare(rows)


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
    allowed = projector.rtol * (noise @ matrix.double().T).norm(dim=1) + 1e-5 * noise.norm(dim=1)
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
    torch.testing.assert_close(projection.info.residual * before, after, rtol=1e-3, atol=1e-5)
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
    torch.testing.assert_close(projection.info.residual * before, after, rtol=1e-3, atol=1e-5)
    unit = unit_rows(matrix)
    if case in WELL_CONDITIONED:
        error = (projection.directions.double() - noise @ oracle(case)).norm(dim=1)
        moved = 2.0**-11 * float(unit.norm()) / smallest(unit)  # of the kernel, by rounding the entries
        assert (error <= 1e-2 * before / smallest(matrix) + 2 * moved * noise.norm(dim=1)).all()


@pairs(lambda name, case: case in ("full_rank", "step", "one_block"))
def test_tolerance_that_halved_rows_cannot_meet_is_said_to_be_missed(name: str, case: str) -> None:
    matrix = CASES[case].matrix
    projector, noise = PROJECTORS[name](1e-6), gaussian(3, matrix.shape[1])
    with pytest.warns(ConvergenceWarning):
        projection = projector.apply(projector.prepare(halved(matrix, CASES[case].block_rows)), noise)
    assert not projection.info.converged.any()
    if isinstance(projector, Alternating | Krylov) and case in WELL_CONDITIONED:
        assert projection.info.outcome is Outcome.ROUNDED
    before, after = ((v.double() @ matrix.T).norm(dim=1) for v in (noise, projection.directions))
    torch.testing.assert_close(projection.info.residual * before, after, rtol=1e-2, atol=0)
    assert (after > 1e-6 * before).all()


# --- the trace ---


@pytest.mark.parametrize(("size", "rank"), [(5, 1), (30, 10), (30, 29), (30, 30), (30, 0)])
def test_estimate_of_the_trace_is_unbiased_and_never_above_the_size(size: int, rank: int) -> None:
    basis = torch.linalg.qr(gaussian(size, size)).Q[:, :rank]
    noise = gaussian(20_000, size, seed=1) * 10 ** gaussian(20_000, 1, seed=2)  # any length will do
    estimates = traces(noise, noise @ basis @ basis.T)
    assert estimates.dtype == torch.float64
    assert estimates.min() >= -1e-12
    assert estimates.max() <= size * (1 + 1e-12)
    spread = (2 * rank * (1 - rank / size) * size / (size + 2)) ** 0.5  # of a beta distribution
    assert float(estimates.mean()) == pytest.approx(rank, abs=4 * spread / 20_000**0.5 + 1e-9)
    assert float(estimates.std()) == pytest.approx(spread, rel=0.05, abs=1e-9)


def test_estimate_holds_for_maps_that_are_no_projections() -> None:
    values = gaussian(1, 40)[0].sigmoid()
    noise = gaussian(20_000, 40, seed=1)
    estimates = traces(noise.float(), noise.float() * values.float())
    assert float(estimates.mean()) == pytest.approx(float(values.sum()), rel=0.01)


def test_zero_noise_has_a_trace_of_zero() -> None:
    assert torch.equal(traces(torch.zeros(2, 5), torch.zeros(2, 5)), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("rank", [0, 3, 10, 20])
def test_standard_error_of_one_estimate_is_that_of_a_projector(rank: int) -> None:
    mean, error = mean_and_error(torch.tensor([float(rank)], dtype=torch.float64), 20)
    assert (mean, error) == (rank, pytest.approx((2 * rank * (1 - rank / 20)) ** 0.5))
    assert mean_and_error(torch.tensor([4.0, 6.0, 8.0]), 20) == (6.0, pytest.approx(2 / 3**0.5))
    assert mean_and_error(torch.tensor([-1e-9]), 20) == (0.0, 0.0)  # rounding is no negative dimension
