"""How fast the iterations converge, where they end, and what stays when a method stops early."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import (
    Alternating,
    ExactDual,
    ExactPrimal,
    Krylov,
    Lanczos,
    Outcome,
    Projection,
    Projector,
    Sketched,
)
from nullbayes.testing import cases, kernel_projector
from support.drawing import matrix_from_singular_values, randn, seeded

CASES = {case.name: case for case in cases(torch.get_default_device())}


def gaussian(n: int, columns: int, seed: int = 0) -> Tensor:
    return randn(n, columns, dtype=torch.float64, generator=seeded(seed))


def quietly(projector: Projector, matrix: Tensor, noise: Tensor, block_rows: int | None = None) -> Projection:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return projector.apply(projector.prepare(nb.DenseRows(matrix, block_rows)), noise)


def two_blocks(angles: Tensor, n_columns: int) -> Tensor:
    """Two blocks of orthonormal rows that make these principal angles."""
    k = len(angles)
    basis = torch.linalg.qr(gaussian(n_columns, 2 * k)).Q.T
    return torch.cat([basis[:k], angles.cos()[:, None] * basis[:k] + angles.sin()[:, None] * basis[k:]])


# --- Alternating ---


@pytest.mark.parametrize("angle", [0.2, 0.5, 1.0])
def test_two_blocks_contract_by_the_squared_cosine_of_the_friedrichs_angle(angle: float) -> None:
    matrix = two_blocks(torch.tensor([angle, 1.2, 1.5], dtype=torch.float64), 10)
    noise = gaussian(4, 10)
    limit = noise @ kernel_projector(matrix)
    errors = [
        (quietly(Alternating(rtol=1e-30, max_sweeps=k), matrix, noise, 3).directions - limit).norm(dim=1)
        for k in range(3, 10)
    ]
    for before, after in itertools.pairwise(errors):  # Kayalar and Weinert 1988
        torch.testing.assert_close(after / before, torch.full((4,), np.cos(angle) ** 2).double(), rtol=0.03, atol=0)


@pytest.mark.parametrize("kind", [Alternating, Krylov])
@pytest.mark.parametrize(
    ("case", "rtol"), [("full_rank", 1e-8), ("rows_of_very_different_length", 1e-8), ("power_law", 1e-2)]
)
def test_larger_blocks_need_fewer_sweeps(kind: type[Alternating | Krylov], case: str, rtol: float) -> None:
    matrix = CASES[case].matrix
    noise = gaussian(3, matrix.shape[1])
    sweeps = [quietly(kind(rtol=rtol), matrix, noise, block).info.sweeps for block in (2, 15, 30, len(matrix))]
    assert sweeps == sorted(sweeps, reverse=True)
    assert sweeps[0] > sweeps[2] > sweeps[3]


@pytest.mark.parametrize("kind", [Alternating, Krylov])
@pytest.mark.parametrize("case", ["full_rank", "step", "rows_of_very_different_length", "more_rows_than_columns"])
def test_one_block_is_direct(kind: type[Alternating | Krylov], case: str) -> None:
    matrix = CASES[case].matrix
    blocks = Alternating(shift=0.0, rtol=1e-8)
    projector = blocks if kind is Alternating else Krylov(blocks, rtol=1e-8)
    info = quietly(projector, matrix, gaussian(3, matrix.shape[1]), len(matrix)).info
    assert info.converged.all()
    assert info.sweeps <= 2


@pytest.mark.parametrize(
    ("case", "rtol"), [("nearly_parallel_blocks", 2e-2), ("paper_rate_counterexample", 6e-3), ("power_law", 5e-3)]
)
def test_krylov_needs_far_fewer_sweeps_where_alternating_is_slow(case: str, rtol: float) -> None:
    matrix, block_rows = CASES[case].matrix, CASES[case].block_rows
    noise = gaussian(3, matrix.shape[1])
    plain = quietly(Alternating(rtol=rtol, max_sweeps=2000), matrix, noise, block_rows).info
    faster = quietly(Krylov(rtol=rtol, max_sweeps=2000), matrix, noise, block_rows).info
    assert plain.converged.all()
    assert faster.converged.all()
    assert 2 * faster.sweeps < plain.sweeps


def test_default_block_is_the_rows_own_then_all_of_them() -> None:
    matrix = CASES["full_rank"].matrix
    assert len(Alternating().prepare(nb.DenseRows(matrix, 20)).steps) == 3
    assert len(Alternating(block_rows=12).prepare(nb.DenseRows(matrix, 20)).steps) == 5
    assert len(Alternating().prepare(nb.DenseRows(matrix)).steps) == 1


# --- where they end ---


@pytest.mark.parametrize(("kind", "limit", "done"), [(Alternating, 7, 7), (Krylov, 7, 7), (Krylov, 1, 1)])
def test_max_sweeps_ends_the_iteration_with_advice(kind: type[Alternating | Krylov], limit: int, done: int) -> None:
    matrix = CASES["nearly_parallel_blocks"].matrix
    projector = kind(rtol=1e-8, max_sweeps=limit)
    with pytest.warns(ConvergenceWarning, match="block_rows"):
        info = projector.apply(projector.prepare(nb.DenseRows(matrix, 25)), gaussian(2, 100)).info
    assert info.outcome is Outcome.MAX_SWEEPS
    assert info.sweeps == done
    assert "max_sweeps" in info.outcome.value


@pytest.mark.parametrize("kind", [Alternating, Krylov])
def test_sample_that_has_converged_is_frozen_while_the_others_go_on(kind: type[Alternating | Krylov]) -> None:
    matrix = CASES["full_rank"].matrix
    hard, inside = gaussian(2, 100)
    projector = kind(rtol=1e-2)
    state = projector.prepare(nb.DenseRows(matrix, 16))
    top = torch.linalg.eigh(state.parallel_sweep(torch.eye(100, dtype=torch.float64)))[1][:, -1]  # a step clears it
    block = matrix[:16].T @ gaussian(1, 16)[0]  # so does one block
    easy = inside @ kernel_projector(matrix) + (block if kind is Alternating else top)
    residuals: list[Tensor] = []
    together = projector.apply(
        state, torch.stack([easy, hard]), callback=lambda _, residual: residuals.append(residual.clone())
    )
    alone = projector.apply(state, easy[None])
    assert alone.info.sweeps < together.info.sweeps
    torch.testing.assert_close(together.directions[0], alone.directions[0], rtol=0, atol=1e-13)
    curve = torch.stack(residuals)
    first = int((curve[:, 0] <= 1e-2).nonzero()[0])
    assert len(curve) > first + 1
    assert (curve[first:, 0] == curve[first, 0]).all()


BEYOND = sorted(set(CASES) - {"all_zero", "more_rows_than_columns", "power_law"})


@pytest.mark.parametrize(("dtype", "level"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=["64", "32"])
@pytest.mark.parametrize("case", BEYOND)
def test_krylov_beyond_convergence_does_not_change_the_part_in_the_null_space(
    case: str, dtype: torch.dtype, level: float
) -> None:
    """Once its gradient is all rounding, plain conjugate gradients on I - Q add any multiple of the kernel to v."""
    matrix = CASES[case].matrix.to(dtype)
    noise = gaussian(3, matrix.shape[1]).to(dtype)
    projection = quietly(Krylov(rtol=1e-30, max_sweeps=600), matrix, noise, CASES[case].block_rows)
    ended = projection.info.outcome in (Outcome.STAGNATED, Outcome.MAX_SWEEPS)
    assert ended or float(projection.info.residual.max()) == 0  # a single row can be removed to the last bit
    exact = matrix.double()
    kernel = kernel_projector(exact / exact.norm(dim=1, keepdim=True).clamp_min(1e-30), rtol=1e-6)
    drift = (projection.directions.double() - noise.double()) @ kernel
    assert (drift.norm(dim=1) <= level * noise.norm(dim=1)).all()
    assert (projection.directions.norm(dim=1) <= (1 + level) * noise.norm(dim=1)).all()


@pytest.mark.parametrize("kind", [Alternating, Krylov])
def test_a_tolerance_below_rounding_ends_in_stagnation(kind: type[Alternating | Krylov]) -> None:
    info = quietly(kind(rtol=1e-30, max_sweeps=5000), CASES["one_block"].matrix, gaussian(3, 80), 36).info
    assert info.outcome is Outcome.STAGNATED
    assert info.sweeps < 5000
    assert (info.residual < 1e-14).all()


# --- Lanczos ---


def test_lanczos_residual_falls_as_the_rank_grows() -> None:
    matrix = CASES["power_law"].matrix
    noise = gaussian(4, 150)
    residual = torch.stack([quietly(Lanczos(rank=k), matrix, noise).info.residual for k in (1, 10, 30, 60, 100)])
    assert (residual.diff(dim=0) < 0).all()
    assert (residual[-1] < 1e-6).all()


def test_lanczos_is_near_the_best_subspace_of_its_rank() -> None:
    matrix = CASES["power_law"].matrix
    noise = gaussian(50, 150)
    energy = torch.linalg.svdvals(matrix).square().flip(0).cumsum(0).flip(0)
    for k in (10, 20, 40):
        left = matrix @ quietly(Lanczos(rank=k), matrix, noise).directions.T
        assert float(left.square().sum(0).mean()) < 10 * float(energy[k])


@pytest.mark.parametrize("rank", [5, 10, 20])
def test_truncated_lanczos_leaves_the_null_space_alone(rank: int) -> None:
    matrix = CASES["full_rank"].matrix
    noise = gaussian(3, 100)
    projection = quietly(Lanczos(rank=rank), matrix, noise)
    moved = (projection.directions - noise) @ kernel_projector(matrix)
    assert moved.norm() < 1e-7
    assert projection.info.outcome is Outcome.TRUNCATED
    assert projection.info.rank == projection.info.sweeps == rank


@pytest.mark.parametrize(
    "sigma",
    [
        [2.0] * 12,
        [3.0] * 6 + [1.0] * 6,
        torch.linspace(1, 3, 40).tolist(),
    ],
    ids=["one value", "two values", "forty values"],
)
def test_lanczos_of_full_rank_is_exact_and_restarts_on_repeated_eigenvalues(sigma: list[float]) -> None:
    """A Krylov space sees each eigenvalue once, however many eigenvectors it has."""
    matrix = matrix_from_singular_values(sigma, 50, 60, seeded(1))
    noise = gaussian(3, 60)
    projection = quietly(Lanczos(rank=60, rtol=1e-6), matrix, noise)
    assert projection.info.rank == len(sigma)
    assert projection.info.converged.all()
    torch.testing.assert_close(projection.directions, noise @ kernel_projector(matrix), rtol=0, atol=1e-6)


def test_lanczos_depends_on_its_seed_alone() -> None:
    matrix, noise = CASES["power_law"].matrix, gaussian(2, 150)
    one, same, other = (quietly(Lanczos(rank=9, seed=seed), matrix, noise).directions for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


# --- truncation to a tolerance ---

TRUNCATED = {"ExactDual": ExactDual, "ExactPrimal": ExactPrimal}
every_truncated = pytest.mark.parametrize("name", TRUNCATED)


def spectrum(shape: tuple[int, int]) -> Tensor:
    """Rows of unit length, so that what is removed follows the spectrum of A itself."""
    matrix = matrix_from_singular_values(torch.logspace(0, -4, min(shape), dtype=torch.float64), *shape, seeded(2))
    return matrix / matrix.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("rtol", [0.3, 1e-2, 1e-3])
@pytest.mark.parametrize("shape", [(40, 70), (90, 50)], ids=["wide", "tall"])
@every_truncated
def test_truncation_removes_the_fewest_directions_that_reach_the_tolerance(
    name: str, shape: tuple[int, int], rtol: float
) -> None:
    matrix = spectrum(shape)
    eigenvalues, vectors = np.linalg.eigh((matrix.T @ matrix).cpu().numpy())
    # the expected |A v|² is the sum of the eigenvalues that stay; a third of the tolerance, for the spread of samples
    stays = int((np.cumsum(eigenvalues.clip(0)) <= (rtol / 3) ** 2 * eigenvalues.sum()).sum())
    assert shape[1] - min(shape) < stays < shape[1]
    noise = gaussian(200, shape[1])
    projection = quietly(TRUNCATED[name](truncate=True, rtol=rtol), matrix, noise)
    assert projection.info.kernel_dimension == stays
    assert projection.info.converged.all()
    best = torch.as_tensor(vectors[:, :stays])
    torch.testing.assert_close(projection.directions, noise @ best @ best.T, rtol=0, atol=1e-7)
    mean = (projection.directions @ matrix.T).square().sum(1).mean() / (noise @ matrix.T).square().sum(1).mean()
    assert mean.sqrt() <= rtol / 2


@every_truncated
def test_truncation_holds_short_rows_as_well_as_long_ones(name: str) -> None:
    matrix = CASES["rows_of_very_different_length"].matrix
    projection = quietly(TRUNCATED[name](truncate=True, rtol=1e-2), matrix, gaussian(50, 100))
    unit = matrix / matrix.norm(dim=1, keepdim=True)
    for rows in (matrix, unit):
        left = (projection.directions @ rows.T).square().sum(1).mean()
        assert left.sqrt() <= 1e-2 * rows.norm()


@every_truncated
def test_truncation_below_rounding_gives_the_null_space_itself(name: str) -> None:
    matrix = CASES["full_rank"].matrix
    noise = gaussian(3, 100)
    projection = quietly(TRUNCATED[name](truncate=True, rtol=1e-12), matrix, noise)
    assert projection.info.rank == 60
    torch.testing.assert_close(projection.directions, noise @ kernel_projector(matrix), rtol=0, atol=1e-12)


@every_truncated
def test_verdict_on_a_truncated_sample_does_not_depend_on_its_scale(name: str) -> None:
    """Noise along a direction that stays has |A v| = |A noise|, which is small beside that of isotropic noise."""
    matrix = spectrum((40, 70))
    projector = TRUNCATED[name](truncate=True, rtol=1e-2)
    state = projector.prepare(nb.DenseRows(matrix))
    weakest = 8 * torch.linalg.svd(matrix).Vh[39:40]
    for scale in (1e-4, 1.0, 1e4):
        assert projector.apply(state, scale * weakest).info.converged.all()


@pytest.mark.parametrize(("kind", "rank"), [(ExactDual, 40), (ExactPrimal, 40)])
def test_cutoff_moves_what_counts_as_zero(kind: type[ExactDual | ExactPrimal], rank: int) -> None:
    step = CASES["step"].matrix
    unit = step / step.norm(dim=1, keepdim=True)
    assert quietly(kind(cutoff=1e-4), unit, gaussian(1, 120)).info.rank == rank
    assert quietly(kind(), unit, gaussian(1, 120)).info.rank == 80
    assert quietly(kind(cutoff=1e-4), unit, gaussian(1, 120)).info.cutoff == 1e-4


# --- float32 factors ---


@pytest.mark.cpu
@pytest.mark.parametrize(("block_rows", "precision"), [(1100, "float32"), (550, "float64")])
def test_large_float32_blocks_are_factored_in_float32_and_converge_all_the_same(
    block_rows: int, precision: str
) -> None:
    matrix, noise = gaussian(1100, 2400).float(), gaussian(2, 2400, seed=1)
    projector = Alternating(rtol=1e-4)
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix, block_rows)), noise)
    assert projection.info.precision == precision
    left = (projection.directions @ matrix.T).norm(dim=1)
    assert (left <= 1.01e-4 * (noise.float() @ matrix.T).norm(dim=1)).all()


@every_truncated
def test_a_sample_that_is_above_the_tolerance_by_chance_is_told_so(name: str) -> None:
    """One direction decides, so that one sample in 370 has three times its root mean square there."""
    columns = 400 if name == "ExactDual" else 60
    matrix = torch.zeros(2 if name == "ExactDual" else 80, columns, dtype=torch.float64)
    matrix[:, 0], matrix[::2, 1], matrix[1::2, 1] = 1.0, 0.0033, -0.0033
    projector = TRUNCATED[name](truncate=True, rtol=1e-2)
    noise = torch.ones(1, columns, dtype=torch.float64)
    noise[0, 1] = 4.0
    with pytest.warns(nb.errors.ConvergenceWarning, match="in the mean over noise.*by chance: use them as they are"):
        projection = projector.apply(projector.prepare(nb.DenseRows(matrix)), noise)
    assert projection.info.outcome is Outcome.IN_THE_MEAN


# --- rows that are more than the columns ---


@pytest.mark.parametrize("n_blocks", [2, 4])
def test_conjugate_gradients_over_blocks_leave_least_where_rows_are_more_than_columns(n_blocks: int) -> None:
    """Their steps count every direction of a block alike. This is why plans avoid them there."""
    n_rows, n_columns = 1200, 600
    scales = torch.arange(1, n_columns + 1, dtype=torch.float64) ** -1.5
    matrix = (gaussian(n_rows, n_columns) * scales) @ torch.linalg.qr(gaussian(n_columns, n_columns, 1)).Q
    rows, noise = nb.DenseRows(matrix), gaussian(20, n_columns, 2)
    rows.rows_per_example = 5
    blocks = Alternating(block_rows=n_rows // n_blocks)
    one, several, swept, sketched = (
        projector.apply(projector.prepare(rows), noise).info
        for projector in (Krylov(Alternating(block_rows=n_rows)), Krylov(blocks), blocks, Sketched(0.2))
    )
    for info in (one, swept, sketched):
        assert info.converged.all()
        assert info.kernel_dimension > 1.3 * several.kernel_dimension
    assert several.converged.all()
