"""The random map that keeps lengths, and Lanczos' process with two vectors."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard

import nullbayes as nb
from nullbayes.errors import SettingsError
from nullbayes.linalg.lanczos import lanczos_process
from nullbayes.linalg.sketch import Sketch
from nullbayes.linalg.sketch import hadamard as transformed
from support.drawing import randn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sketch(n_columns: int, size: int, seed: int) -> Sketch:
    return Sketch(n_columns, size, seed, torch.get_default_device())


@pytest.mark.parametrize(
    "size", [1, 2, 32, 64, 1024, pytest.param(8192, marks=pytest.mark.slow)]
)  # one factor, several, and a last one that is smaller
def test_the_transform_is_the_hadamard_matrix(size: int) -> None:
    vectors = normal(3, size)
    matrix = torch.as_tensor(hadamard(size), dtype=torch.float64) / size**0.5
    torch.testing.assert_close(transformed(vectors), vectors @ matrix.to(vectors.device))


@pytest.mark.parametrize("columns", [1, 5, 16, 17])
def test_a_sketch_of_full_size_is_orthogonal(columns: int) -> None:
    whole = sketch(columns, 1 << (columns - 1).bit_length(), 1)
    image = whole(torch.eye(columns, dtype=torch.float64))
    torch.testing.assert_close(image @ image.T, torch.eye(columns, dtype=torch.float64))


def test_larger_sketches_preserve_norms_better() -> None:
    vectors = torch.zeros(40, 1000, dtype=torch.float64)
    vectors[:, :3] = normal(40, 3)  # few entries: a plain choice of entries would see nothing of them
    vectors[0] = 1.0  # a single entry after the transform, but for the signs
    lengths = vectors.square().sum(1)
    errors = [float((sketch(1000, s, 0)(vectors).square().sum(1) / lengths - 1).abs().max()) for s in (30, 200, 1024)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.5
    assert errors[2] < 1e-12


def test_the_seed_determines_the_sketch_and_sizes_are_checked() -> None:
    vectors = normal(2, 20)
    assert torch.equal(sketch(20, 6, 3)(vectors), sketch(20, 6, 3)(vectors))
    assert not torch.allclose(sketch(20, 6, 3)(vectors), sketch(20, 6, 4)(vectors))
    for size in (0, 33):
        with pytest.raises(SettingsError, match="between 1 and 32"):
            sketch(20, size, 0)


def process(matrix: torch.Tensor, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of Lanczos' process, and the combinations of them that lie in the row space."""
    vectors: list[torch.Tensor] = []
    found = lanczos_process(
        nb.DenseRows(matrix), size, torch.Generator().manual_seed(seed), lambda k, vector: vectors.append(vector)
    )
    return torch.stack(vectors), found.in_row_space().T.to(matrix) @ torch.stack(vectors)


def test_lanczos_vectors_span_the_krylov_space() -> None:
    matrix = normal(12, 30)
    vectors, ritz = process(matrix, 5)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(5, dtype=torch.float64), atol=1e-9, rtol=0)
    krylov, power = [], vectors[0]
    for _ in vectors:
        krylov.append(power / power.norm())
        power = matrix.T @ (matrix @ power)
    q = torch.linalg.qr(torch.stack(krylov).T).Q
    for span in (vectors, ritz):
        assert span.shape == (5, 30)
        assert float((span - span @ q @ q.T).norm(dim=1).max()) < 1e-9


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_steps_than_the_rank_stay_in_the_row_space(dtype: torch.dtype, seed: int) -> None:
    """Rounding leads the process into the kernel; what is taken of it lies in the row space, and all of that."""
    matrix = (normal(6, 40, seed=seed) * 1.8 ** torch.arange(6, dtype=torch.float64)[:, None]).to(dtype)
    _, ritz = process(matrix, 16, seed)
    rows = torch.linalg.qr(matrix.double().T).Q
    assert float((ritz.double() - ritz.double() @ rows @ rows.T).norm(dim=1).max()) < 0.1
    assert float(torch.linalg.svdvals(ritz @ rows.to(dtype)).min()) > 0.5


def test_lanczos_of_zero_rows_returns_no_vectors() -> None:
    found = lanczos_process(
        nb.DenseRows(torch.zeros(3, 4, dtype=torch.float64)), 3, torch.Generator().manual_seed(0), lambda k, v: None
    )
    assert found.in_row_space().shape == (0, 0)
