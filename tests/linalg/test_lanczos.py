"""Krylov bases lie in the row space; quadrature gives traces, exactly in expectation."""

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.linalg.lanczos import krylov_basis, spectral_quadrature
from nullbayes.testing import kernel_projector
from support.drawing import matrix_from_singular_values, randn, seeded

POWER_LAW = torch.logspace(0, -6, 30, dtype=torch.float64)
WELL_CONDITIONED = torch.linspace(1, 3, 30, dtype=torch.float64)


# --- krylov_basis ---


@pytest.mark.parametrize(
    ("sigma", "size"),
    [
        (POWER_LAW, 5),
        (POWER_LAW, 30),
        (WELL_CONDITIONED, 10),
        (WELL_CONDITIONED, 40),
        (torch.ones(12), 12),
        (torch.ones(12), 30),
        (torch.tensor([4.0] * 3 + [2.0] * 3 + [1.0] * 3), 30),
        (torch.tensor([7.0]), 4),
    ],
)
def test_basis_is_orthonormal_and_inside_the_row_space(sigma: Tensor, size: int) -> None:
    matrix = matrix_from_singular_values(sigma, 40, 50, seeded())
    basis = krylov_basis(nb.DenseRows(matrix), size, seeded(1))
    assert basis.shape == (min(size, len(sigma)), 50)  # no more than there is, and no less: it starts anew
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), rtol=0, atol=1e-12)
    outside = basis @ kernel_projector(matrix)
    assert outside.norm(dim=1).max() < 1e-5


def test_rows_of_zeros_have_no_basis() -> None:
    assert krylov_basis(nb.DenseRows(torch.zeros(4, 6)), 3, seeded()).shape == (0, 6)


def test_basis_finds_the_large_directions_first() -> None:
    matrix = matrix_from_singular_values(POWER_LAW, 40, 50, seeded())
    basis = krylov_basis(nb.DenseRows(matrix), 10, seeded(1))
    top = torch.linalg.svd(matrix).Vh[:4]
    assert ((top @ basis.T).norm(dim=1) > 0.98).all()
    assert (matrix @ basis.T).norm() > 0.999 * matrix.norm()


def test_basis_depends_on_the_generator() -> None:
    rows = nb.DenseRows(matrix_from_singular_values(POWER_LAW, 40, 50, seeded()))
    assert torch.equal(krylov_basis(rows, 4, seeded(1)), krylov_basis(rows, 4, seeded(1)))
    assert not torch.allclose(krylov_basis(rows, 4, seeded(1)), krylov_basis(rows, 4, seeded(2)))


# --- spectral_quadrature ---

FUNCTIONS = {
    "one": torch.ones_like,
    "identity": lambda x: x,
    "cube": lambda x: x**3,
    "log": lambda x: (1 + 100 * x).log(),
    "inverse": lambda x: 1 / (x + 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [POWER_LAW, WELL_CONDITIONED], ids=["power law", "well conditioned"])
def test_traces_are_right_within_monte_carlo_error(sigma: Tensor) -> None:
    n_probes, n_columns = 100, 40
    rows = nb.DenseRows(matrix_from_singular_values(sigma, 35, n_columns, seeded()))
    nodes, weights = spectral_quadrature(rows, n_probes=n_probes, steps=n_columns, generator=seeded(1))
    eigenvalues = torch.cat([sigma.square().cpu(), torch.zeros(n_columns - len(sigma), device="cpu")])
    for function in FUNCTIONS.values():
        values = function(eigenvalues)
        # a probe z gives P z⊤f(A⊤A)z/|z|², with z/|z| uniform on the sphere
        variance = 2 * (n_columns * values.square().sum() - values.sum().square()) / (n_columns + 2)
        error = float((weights * function(nodes)).sum() - values.sum())
        assert abs(error) <= 4 * float(variance / n_probes) ** 0.5 + 1e-9


@pytest.mark.parametrize("steps", [1, 2, 5, 40, 100])
def test_each_probe_is_exact_for_polynomials_of_degree_below_twice_the_steps(steps: int) -> None:
    matrix = matrix_from_singular_values(WELL_CONDITIONED / 3, 35, 40, seeded())
    nodes, weights = spectral_quadrature(nb.DenseRows(matrix), n_probes=1, steps=steps, generator=seeded(1))
    z = randn(40, dtype=torch.float64, generator=seeded(1))
    z = z / z.norm()
    for degree in range(min(2 * steps, 12)):
        image = z
        for _ in range(degree):
            image = matrix.T @ (matrix @ image)
        assert float((weights * nodes**degree).sum()) == pytest.approx(40 * float(z @ image), rel=1e-9)


def test_weights_are_positive_and_sum_to_the_columns() -> None:
    rows = nb.DenseRows(matrix_from_singular_values(POWER_LAW, 35, 40, seeded()))
    nodes, weights = spectral_quadrature(rows, n_probes=7, steps=6, generator=seeded(1))
    assert len(nodes) == len(weights) == 42
    assert (nodes >= 0).all()
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(40)


def test_spaces_that_close_early_are_taken_as_they_are() -> None:
    isometry = nb.DenseRows(matrix_from_singular_values([2.0] * 40, 40, 40, seeded()))
    nodes, weights = spectral_quadrature(isometry, n_probes=3, steps=10, generator=seeded(1))
    torch.testing.assert_close(nodes.tolist(), [4.0] * 3)
    torch.testing.assert_close(weights.tolist(), [40 / 3] * 3)
    nodes, weights = spectral_quadrature(nb.DenseRows(torch.zeros(4, 6)), n_probes=2, steps=5, generator=seeded(1))
    assert nodes.tolist() == [0.0, 0.0]
    assert float(weights.sum()) == pytest.approx(6)
