"""Noise and rows at the edge, and settings that make no sense."""

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import NullBayesError, SettingsError
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos, Outcome, Projector
from support.drawing import randn
from support.projector_table import CASES, PROJECTORS, RTOL, every_projector, gaussian, oracle, solve


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
def test_an_empty_null_space_leaves_zero_directions(name: str) -> None:
    solved = solve(name, "more_rows_than_columns")
    assert (solved.result.directions.norm(dim=1) <= 1e-7 * solved.noise.norm(dim=1)).all()
    assert abs(solved.result.info.kernel_dimension) < 1e-6


@every_projector
def test_noise_in_the_null_space_is_unchanged(name: str) -> None:
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
def test_cutoffs_outside_zero_to_one_are_refused(kind: type[ExactDual] | type[ExactPrimal], cutoff: float) -> None:
    with pytest.raises(SettingsError, match="0 <= cutoff < 1"):
        kind(cutoff=cutoff)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_lanczos_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(SettingsError, match="rank must be at least 1"):
        Lanczos(rank=rank)


@pytest.mark.parametrize("value", [float("nan"), 1e200], ids=["nan", "squares overflow"])
@pytest.mark.parametrize("kind", [ExactDual, Alternating, Krylov])
def test_rows_without_a_gram_matrix_are_refused(kind: type[Projector], value: float) -> None:
    rows = nb.DenseRows(torch.zeros(4, 7, dtype=torch.float64), block_rows=2)
    rows.pieces[0].tensors()[0].fill_(value)  # it would refuse NaN itself
    with pytest.raises(NullBayesError, match="NaN or Inf"):
        kind().prepare(rows)


class Spoiled(nb.MatrixFreeRows):
    """A matrix whose so many-th product is NaN."""

    def __init__(self, matrix: Tensor) -> None:
        self.calls = self.at = 0
        super().__init__(
            lambda v, where: self.spoil(v @ matrix[where].T), lambda u, where: self.spoil(u @ matrix[where]),
            n_rows=len(matrix), n_columns=matrix.shape[1], block_rows=2, dtype=matrix.dtype, device=matrix.device,
        )  # fmt: skip

    def spoil(self, product: Tensor) -> Tensor:
        self.calls += 1
        return product * torch.nan if self.calls == self.at else product


@pytest.mark.parametrize(
    "projector", [ExactDual(), ExactPrimal(), Alternating(), Krylov(), Lanczos(rank=6)], ids=lambda p: type(p).__name__
)
def test_a_nan_product_raises_an_error_or_is_not_used(projector: Projector) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Spoiled(randn(6, 10, generator=generator, dtype=torch.float64))
    noise, state = randn(2, 10, generator=generator, dtype=torch.float64), projector.prepare(rows)
    rows.frobenius()
    rows.calls = 0
    expected, calls, stopped = projector.apply(state, noise).directions, rows.calls, 0
    for at in range(1, calls + 1):
        rows.calls, rows.at = 0, at
        try:
            found = projector.apply(state, noise)
        except NullBayesError as error:
            stopped += "NaN or Inf" in str(error)
        else:
            torch.testing.assert_close(found.directions, expected, rtol=0, atol=0)
            assert found.info.converged.all()
    assert stopped >= 0.8 * calls  # the others come after the end


def test_rows_whose_lengths_overflow_are_refused_by_lanczos_too() -> None:
    rows = nb.DenseRows(randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e200)
    with pytest.raises(NullBayesError, match="NaN or Inf"):
        Lanczos(rank=3).apply(Lanczos(rank=3).prepare(rows), torch.ones(2, 10, dtype=torch.float64))
