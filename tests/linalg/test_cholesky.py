"""A Cholesky factor takes the place of its matrix, and solves with it as exactly as a factor can."""

import pytest
import torch
from torch import Tensor

from nullbayes.linalg.spectral import cholesky_, cholesky_solve
from support.drawing import matrix_from_singular_values, randn
from support.limited import limited


def positive(n: int, dtype: torch.dtype = torch.float64, condition: float = 9.0) -> Tensor:
    sigma = torch.logspace(0, 0.5 * torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64, device="cpu")
    root = matrix_from_singular_values(sigma, n, n, torch.Generator().manual_seed(n))
    return (root @ root.T).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("panel", [1, 4, 5, 100])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 16, 17, 20, 21, 40])
def test_solves_in_the_place_of_the_matrix(
    n: int, panel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, panel_columns=panel)
    matrix, vectors = positive(n, dtype), randn(3, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, before = torch.linalg.solve(matrix, vectors.T).T, vectors.clone()
    place = matrix.data_ptr()
    assert cholesky_(matrix)
    assert matrix.data_ptr() == place
    found = cholesky_solve(matrix, vectors)
    torch.testing.assert_close(found, expected, rtol=0, atol=200 * torch.finfo(dtype).eps)
    assert torch.equal(vectors, before)  # not even where a transpose is a view


@pytest.mark.parametrize("panel", [3, 16, 64])
@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12])
def test_inverted_blocks_are_as_accurate_as_substitution(
    condition: float, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward error, which is what the residual of a projection sees: of the size of eps, whatever the condition."""
    limited(monkeypatch, panel_columns=panel)
    matrix = positive(64, condition=condition)
    factor, vectors = matrix.clone(), randn(3, 64, generator=torch.Generator().manual_seed(1)).double()
    assert cholesky_(factor)
    solved = cholesky_solve(factor, vectors)
    residual = (solved @ matrix - vectors).norm() / (matrix.norm() * solved.norm())
    assert residual < 1e-12


@pytest.mark.parametrize("n", [4, 5, 21])
def test_only_the_lower_triangle_is_read(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, panel_columns=4)
    matrix, vectors = positive(n), randn(2, n, generator=torch.Generator().manual_seed(1)).double()
    expected = torch.linalg.solve(matrix, vectors.T).T
    matrix += torch.full_like(matrix, 7.0).triu(1)
    assert cholesky_(matrix)
    torch.testing.assert_close(cholesky_solve(matrix, vectors), expected)


@pytest.mark.parametrize("where", [0, 3, 4, 5, 11, 20])
def test_indefinite_block_is_found_wherever_it_is(where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, panel_columns=4)
    matrix = positive(21)
    assert cholesky_(matrix.clone())
    matrix[where, where] = -1.0
    assert not cholesky_(matrix)


def test_matrix_that_is_singular_is_not_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, panel_columns=2)
    assert not cholesky_(torch.ones(5, 5, dtype=torch.float64))
    assert not cholesky_(torch.full((5, 5), float("nan"), dtype=torch.float64))
