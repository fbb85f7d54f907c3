"""Products of halves keep 22 bits, whatever the shape of the matrices."""

import pytest
import torch
from torch import Tensor

from nullbayes.linalg import halves
from nullbayes.linalg.halves import add_cross, add_product, aligned, split
from nullbayes.linalg.spectral import cholesky_, cholesky_solve
from support.drawing import matrix_from_singular_values, randn
from support.limited import limited


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_of_halves_begin_at_multiples_of_sixteen_bytes() -> None:
    assert [aligned(size) for size in (1, 8, 9, 16, 84)] == [8, 8, 16, 16, 88]


@pytest.mark.parametrize("right", [False, True])
def test_both_halves_add_up_to_the_matrix(right: bool) -> None:
    matrix = 100 * gaussian(9, 13)
    both = split(matrix, right=right)
    assert both.shape == (2, 9, 16)
    assert not both[:, :, 13:].any()
    torch.testing.assert_close(both.float().sum(0)[:, :13], matrix, rtol=2.0**-21, atol=0)
    assert torch.equal(both[int(not right), :, :13], matrix.half())  # high


@pytest.mark.parametrize("longest", [4, 100])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 5, 7), (40, 8, 16)], ids=str)
def test_products_keep_22_bits(shape: tuple[int, int, int], longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "LONGEST", longest)
    n, c, d = shape
    a, b, start = gaussian(n, c), gaussian(n, d, seed=1), gaussian(c, d, seed=2)
    result = torch.zeros(aligned(c), aligned(d))
    result[:c, :d] = start
    add_product(result, split(a), split(b, right=True), alpha=-0.5)
    expected = start.double() - 0.5 * a.double().T @ b.double()
    torch.testing.assert_close(result[:c, :d].double(), expected, rtol=0, atol=1e-5)
    assert not result[c:].any()
    assert not result[:, d:].any()


def test_one_half_alone_keeps_eleven() -> None:
    """The test above sees the difference."""
    a, b = gaussian(40, 8), gaussian(40, 16, seed=1)
    error = (a.half().double().T @ b.half().double() - a.double().T @ b.double()).abs().max()
    assert error > 1e-3


@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 9, 16)], ids=str)
def test_products_of_halves_are_added(shape: tuple[int, int, int]) -> None:
    n, m, c = shape
    a, b, result = gaussian(n, c).half(), gaussian(m, c, seed=1).half(), gaussian(n, m, seed=2)
    expected = result.double() + a.double() @ b.double().T
    add_cross(result, a, b)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


def test_numbers_too_small_for_halves_count_as_zero() -> None:
    matrix = torch.full((3, 8), 1e-9)
    assert not split(matrix).any()


# --- the factor of a float32 matrix ---


@pytest.mark.parametrize("panel", [1, 5, 100])
@pytest.mark.parametrize("n", [1, 4, 9, 21, 40])
def test_factor_by_halves_solves(n: int, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, panel_columns=panel)
    root = matrix_from_singular_values(torch.linspace(1, 30, n), n, n, torch.Generator().manual_seed(n))
    matrix, vectors = root @ root.T, randn(3, n, generator=torch.Generator().manual_seed(1))
    factor = matrix.float()
    assert cholesky_(factor, by_halves=True)
    solved = cholesky_solve(factor, vectors).double()
    assert (solved @ matrix - vectors).norm() <= 1e-6 * matrix.norm() * solved.norm()


def test_indefinite_matrix_is_not_factored_by_halves() -> None:
    matrix = torch.eye(9)
    matrix[5, 5] = -1.0
    assert not cholesky_(matrix, by_halves=True)
