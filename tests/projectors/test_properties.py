"""The map of every projector is the orthogonal projection on the null space, for matrices of any shape and rank."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos, Projector
from nullbayes.testing import kernel_projector
from support.drawing import matrix_from_singular_values, rand, randint, randn, randperm, seeded

TIGHT = 1e-11
PROJECTORS: dict[str, Callable[[], Projector]] = {
    "ExactDual": lambda: ExactDual(rtol=TIGHT),
    "ExactPrimal": lambda: ExactPrimal(rtol=TIGHT),
    "Alternating": lambda: Alternating(rtol=TIGHT, max_sweeps=2000),
    "Krylov": lambda: Krylov(rtol=TIGHT, max_sweeps=2000),
}
every_projector = pytest.mark.parametrize("name", PROJECTORS)
few = settings(max_examples=12, deadline=None, derandomize=True)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Any shape up to 24 by 24 and any rank, singular values between 1 and 3: to project is no matter of condition."""
    n_rows, n_columns = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    rank = draw(st.integers(0, min(n_rows, n_columns)))
    sigma = torch.linspace(1, 3, rank, dtype=torch.float64)
    return matrix_from_singular_values(sigma, n_rows, n_columns, seeded(draw(st.integers(0, 1000))))


block_sizes = st.integers(1, 30)


def project(name: str, matrix: Tensor, vectors: Tensor, block_rows: int | None = None) -> Tensor:
    projector = PROJECTORS[name]()
    projection = projector.apply(projector.prepare(nb.DenseRows(matrix, block_rows)), vectors)
    assert projection.info.converged.all()
    return projection.directions


def as_matrix(name: str, matrix: Tensor, block_rows: int | None = None) -> Tensor:
    return project(name, matrix, torch.eye(matrix.shape[1], dtype=torch.float64), block_rows).T


def assert_near(left: Tensor, right: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=atol)


@every_projector
@few
@given(matrix=matrices(), block_rows=block_sizes)
def test_map_is_the_orthogonal_projection_on_the_null_space(name: str, matrix: Tensor, block_rows: int) -> None:
    map_ = as_matrix(name, matrix, block_rows)
    expected = kernel_projector(matrix)
    assert_near(map_ @ map_, map_)
    assert_near(map_, map_.T)
    assert_near(matrix @ map_, torch.zeros_like(matrix))
    assert_near(map_ @ expected, expected)  # stays where it is
    assert float(map_.trace()) == pytest.approx(matrix.shape[1] - int(torch.linalg.matrix_rank(matrix)), abs=1e-8)
    assert torch.linalg.matrix_norm(map_, 2) <= 1 + 1e-9  # never longer


@every_projector
@few
@given(matrix=matrices(), block_rows=block_sizes, seed=st.integers(0, 1000))
def test_order_of_rows_and_size_of_blocks_do_not_matter(name: str, matrix: Tensor, block_rows: int, seed: int) -> None:
    order = randperm(len(matrix), generator=seeded(seed))
    assert_near(as_matrix(name, matrix[order], block_rows), as_matrix(name, matrix))


@every_projector
@few
@given(matrix=matrices(), seed=st.integers(0, 1000))
def test_repeated_rows_and_zero_rows_do_not_matter(name: str, matrix: Tensor, seed: int) -> None:
    again = randint(len(matrix), (len(matrix) + 3,), generator=seeded(seed))
    more = torch.cat([matrix, matrix[again], torch.zeros(2, matrix.shape[1], dtype=torch.float64)])
    assert_near(as_matrix(name, more, 7), as_matrix(name, matrix, 7))


@every_projector
@few
@given(
    seed=st.integers(0, 1000), block_rows=st.integers(1, 12), span=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_length_of_rows_does_not_matter(name: str, seed: int, block_rows: int, span: int, dtype: torch.dtype) -> None:
    """Rows of one matrix may be up to 1e60 times as long as others."""
    matrix = matrix_from_singular_values(torch.linspace(1, 2, 12), 12, 20, seeded(seed))
    lengths = 10 ** (span * (2 * rand(12, 1, dtype=torch.float64, generator=seeded(seed)) - 1))
    projector = PROJECTORS[name]()
    if not name.startswith("Exact"):
        # the stopping sentence speaks of |A v|, in which rows a million times shorter hardly count: sweep on regardless
        projector = replace(projector, rtol=1e-30, max_sweeps=300)
    state = projector.prepare(nb.DenseRows((lengths * matrix).to(dtype), block_rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        directions = projector.apply(state, torch.eye(20, dtype=dtype)).directions
    assert directions.dtype is dtype
    assert_near(directions.double(), kernel_projector(matrix), 1e-9 if dtype is torch.float64 else 1e-5)


# --- odd rows, odd noise, every precision and scale -------------------------------------------------------------------

ALL = {**PROJECTORS, "Lanczos": lambda: Lanczos(rtol=TIGHT)}
PRECISIONS = {torch.float64: (TIGHT, 1e-8), torch.float32: (1e-4, 5e-3)}  # the tolerance, and how near that brings


@st.composite
def odd_matrices(draw: st.DrawFn) -> Tensor:
    """Any shape and rank, with rows that repeat, rows and columns of zeros, all in any order."""
    matrix, generator = draw(matrices()), seeded(draw(st.integers(0, 1000)))
    again = randint(len(matrix), (draw(st.integers(0, 5)),), generator=generator)
    matrix = torch.cat([matrix, matrix[again], matrix.new_zeros(draw(st.integers(0, 3)), matrix.shape[1])])
    matrix = torch.cat([matrix, matrix.new_zeros(len(matrix), draw(st.integers(0, 3)))], dim=1)
    return matrix[randperm(len(matrix), generator=generator)][:, randperm(matrix.shape[1], generator=generator)]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ALL)
@settings(few, max_examples=30)
@given(
    matrix=odd_matrices(), block_rows=st.integers(1, 40), exponent=st.sampled_from([-30, 30, -20, 20, -8, 8, 0]),
    n_samples=st.integers(1, 3), seed=st.integers(0, 1000),
)  # fmt: skip
def test_projection_matches_the_dense_answer_at_every_scale(
    name: str, dtype: torch.dtype, matrix: Tensor, block_rows: int, exponent: int, n_samples: int, seed: int
) -> None:
    rtol, atol = PRECISIONS[dtype]
    projector = replace(ALL[name](), rtol=rtol)
    noise = randn(n_samples, matrix.shape[1], generator=seeded(seed), dtype=dtype)
    state = projector.prepare(nb.DenseRows((matrix * 10.0**exponent).to(dtype), block_rows))
    projection = projector.apply(state, noise)
    assert projection.directions.dtype is dtype
    assert projection.info.converged.all()
    assert_near(projection.directions.double(), noise.double() @ kernel_projector(matrix), atol)
    nothing = projector.apply(state, torch.zeros_like(noise))
    assert not nothing.directions.any()
    assert nothing.info.converged.all()
    assert not nothing.info.residual.any()
