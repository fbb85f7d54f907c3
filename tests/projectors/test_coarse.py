"""The coarse space holds the leading directions of the normalized rows, and nothing of the null space."""

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import NullBayesError, SettingsError
from nullbayes.projectors import Alternating, Krylov
from nullbayes.projectors.sweep import coarse_space
from nullbayes.testing import cases, kernel_projector
from support.drawing import matrix_from_singular_values, rand, randn, seeded

CASES = {case.name: case for case in cases(torch.get_default_device())}
SPECTRA = {
    "power law": torch.logspace(0, -3, 60, dtype=torch.float64),
    "gap": torch.cat([torch.linspace(3, 2, 10), torch.full((50,), 0.1)]).double(),
    "flat": torch.ones(60, dtype=torch.float64),
}
every_spectrum = pytest.mark.parametrize("sigma", SPECTRA.values(), ids=SPECTRA)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])


def gaussian(n: int, columns: int, seed: int = 0) -> Tensor:
    return randn(n, columns, dtype=torch.float64, generator=seeded(seed))


def with_spectrum(sigma: Tensor, n_rows: int = 80, n_columns: int = 120) -> Tensor:
    return matrix_from_singular_values(sigma.cpu(), n_rows, n_columns, seeded(4))


def unit(matrix: Tensor) -> Tensor:
    lengths = matrix.norm(dim=1, keepdim=True)
    return matrix / torch.where(lengths > 0, lengths, 1.0)


@dtypes
@pytest.mark.parametrize("dimension", [1, 8, 30])
@pytest.mark.parametrize("case", sorted(set(CASES) - {"power_law"}))
def test_basis_is_orthonormal_and_orthogonal_to_the_null_space(case: str, dimension: int, dtype: torch.dtype) -> None:
    matrix = CASES[case].matrix.to(dtype)
    basis = coarse_space(nb.DenseRows(matrix, 10), dimension).basis
    rank = CASES[case].rank
    assert rank is not None
    assert len(basis) == min(dimension, rank) or (case == "nearly_parallel_blocks" and dtype == torch.float32)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=dtype), rtol=0, atol=100 * eps)
    inside = basis.double() @ kernel_projector(unit(CASES[case].matrix))
    assert inside.numel() == 0 or inside.norm(dim=1).max() <= 10 * eps**0.5


@every_spectrum
@pytest.mark.parametrize("dimension", [5, 20])
def test_coarse_space_is_nearly_the_best_of_its_dimension(sigma: Tensor, dimension: int) -> None:
    matrix = with_spectrum(sigma) * (10 ** (4 * rand(80, 1, dtype=torch.float64, generator=seeded(5)) - 2))
    basis = coarse_space(nb.DenseRows(matrix), dimension).basis
    rows = unit(matrix)  # whatever their length: the steps do not depend on it either
    best = torch.linalg.svdvals(rows)[:dimension].square().sum()
    assert (rows @ basis.T).square().sum() >= 0.9 * best


def test_leading_directions_before_a_gap_are_found_to_high_precision() -> None:
    matrix = unit(with_spectrum(SPECTRA["gap"]))
    right = torch.linalg.svd(matrix).Vh[:10]
    basis = coarse_space(nb.DenseRows(matrix), 10).basis
    cosines = torch.linalg.svdvals(basis @ right.T)
    assert cosines.min() > 1 - 1e-3


@dtypes
@pytest.mark.parametrize("size", [1e-25, 1e12])
def test_norms_of_the_rows_do_not_matter(size: float, dtype: torch.dtype) -> None:
    matrix = with_spectrum(SPECTRA["gap"]).to(dtype)
    mixed = matrix.clone()
    mixed[::2] *= size
    basis, same = (coarse_space(nb.DenseRows(rows), 10).basis for rows in (matrix, mixed))
    assert torch.linalg.svdvals(basis.double() @ same.double().T).min() > 1 - 1e-4


def test_removed_is_the_part_in_the_coarse_space() -> None:
    coarse = coarse_space(nb.DenseRows(with_spectrum(SPECTRA["power law"])), 12)
    vectors = gaussian(3, 120)
    removed = coarse.correction(vectors)
    torch.testing.assert_close(removed, vectors @ coarse.basis.T @ coarse.basis)
    torch.testing.assert_close(coarse.correction(removed), removed)
    assert coarse.correction(vectors - removed).norm() < 1e-12


def test_coarse_space_is_deterministic() -> None:
    rows = nb.DenseRows(with_spectrum(SPECTRA["power law"]))
    assert torch.equal(coarse_space(rows, 6).basis, coarse_space(rows, 6).basis)


# --- in a sweep ---


def test_conjugate_gradients_need_fewer_sweeps_where_the_blocks_are_many() -> None:
    matrix, noise = with_spectrum(SPECTRA["power law"], 60), gaussian(3, 120)
    sweeps = []
    for dimension in (0, 10, 30):
        projector = Krylov(Alternating(block_rows=3, coarse=dimension), rtol=1e-2)
        info = projector.apply(projector.prepare(nb.DenseRows(matrix)), noise).info
        assert info.converged.all()
        sweeps.append(info.sweeps)
    assert sweeps[0] > 2 * sweeps[-1]
    assert sweeps == sorted(sweeps, reverse=True)


@dtypes
@pytest.mark.parametrize("dimension", [1, 10, 200])
@pytest.mark.parametrize("case", ["full_rank", "repeated_rows", "zero_rows", "tall_rank_deficient", "all_zero"])
@pytest.mark.parametrize("kind", [Alternating, Krylov])
def test_projection_is_the_same_with_and_without_a_coarse_space(
    kind: type[Alternating | Krylov], case: str, dimension: int, dtype: torch.dtype
) -> None:
    matrix = CASES[case].matrix
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    blocks = Alternating(coarse=dimension, rtol=rtol, max_sweeps=1000)
    projector = blocks if kind is Alternating else Krylov(blocks, rtol=rtol)
    noise = gaussian(3, matrix.shape[1])
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix.to(dtype), CASES[case].block_rows)), noise)
    assert projection.info.converged.all()
    error = projection.directions.double() - noise @ kernel_projector(matrix)
    assert (error.norm(dim=1) <= 5 * rtol * noise.norm(dim=1)).all()


@pytest.mark.parametrize("dimension", [5, 200])
def test_sum_of_the_steps_is_symmetric_and_zero_on_the_null_space_alone(dimension: int) -> None:
    case = CASES["zero_rows"]
    state = Alternating(coarse=dimension).prepare(nb.DenseRows(case.matrix, case.block_rows))
    assert state.coarse is not None
    map_ = state.parallel_sweep(torch.eye(90, dtype=torch.float64))
    torch.testing.assert_close(map_, map_.T, rtol=0, atol=1e-12)
    values = torch.linalg.eigvalsh(map_)
    assert values.min() > -1e-12
    assert int((values > 1e-9).sum()) == case.rank
    assert (map_ @ kernel_projector(case.matrix)).norm() < 1e-10
    torch.testing.assert_close(map_ @ state.coarse.basis.T, state.coarse.basis.T, rtol=0, atol=1e-12)


def test_dimension_below_zero_is_refused() -> None:
    with pytest.raises(SettingsError, match="coarse must be at least 0"):
        Alternating(coarse=-1)


def test_rows_whose_norms_overflow_are_refused() -> None:
    rows = nb.DenseRows(torch.full((3, 4), 1e200, dtype=torch.float64))
    with pytest.raises(NullBayesError, match="squares overflow"):
        coarse_space(rows, 2)
