"""Section 4: the kernel of all rows is the intersection of the kernels of blocks."""

import numpy as np
import pytest
import torch

import nullbayes as nb
from nullbayes.projectors import Alternating, ExactDual, Krylov, Projector
from support.paper import oracle
from support.paper.fitting import EXACT, name_of
from support.paper.networks import classifier, gaussian, regressor


def blocks_of(rows: oracle.Matrix, size: int) -> list[oracle.Matrix]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def projection_of(projector: Projector, rows: oracle.Matrix) -> oracle.Matrix:
    """The matrix that a projector of the library applies: its answer to every unit vector."""
    identity = torch.eye(rows.shape[1], dtype=torch.float64)
    state = projector.prepare(nb.DenseRows(torch.as_tensor(rows)))
    return projector.apply(state, identity).directions.cpu().numpy()


@pytest.mark.parametrize("size", [3, 12, 25])
def test_kernel_of_the_sum_is_the_intersection_of_block_kernels(size: int) -> None:
    rows = classifier().jacobian
    blocks = blocks_of(rows, size)
    kernel_of_sum = oracle.kernel_projector(sum(block.T @ block for block in blocks))
    shared = oracle.intersection_projector([oracle.kernel_projector(block) for block in blocks])
    np.testing.assert_allclose(kernel_of_sum, shared, atol=1e-8)
    np.testing.assert_allclose(oracle.kernel_projector(rows), shared, atol=1e-8)


@pytest.mark.parametrize("projector", EXACT, ids=name_of)
def test_library_projects_on_the_kernel_of_each_block(projector: Projector) -> None:
    blocks = blocks_of(classifier().jacobian, 9)
    matrices = [projection_of(projector, block) for block in blocks]
    for block, matrix in zip(blocks, matrices, strict=True):
        np.testing.assert_allclose(matrix, oracle.kernel_projector(block), atol=1e-9)
    shared = oracle.intersection_projector(matrices)
    np.testing.assert_allclose(projection_of(projector, classifier().jacobian), shared, atol=1e-8)


@pytest.mark.parametrize("size", [6, 13, 24])
@pytest.mark.parametrize("projector", [Alternating, Krylov], ids=name_of)
def test_library_reaches_the_intersection_from_any_blocks(projector: type[Projector], size: int) -> None:
    rows = gaussian(24, 61, seed=60).cpu().numpy()
    alternating = Alternating(block_rows=size, rtol=1e-9, max_sweeps=2000)
    method = alternating if projector is Alternating else Krylov(alternating, rtol=1e-9)
    np.testing.assert_allclose(projection_of(method, rows), oracle.kernel_projector(rows), atol=1e-7)


class TestProjectionFormula:
    """M⊤(MM⊤)⁻¹M is said to be the projection "for any matrix M" with R < P: it needs independent rows."""

    def test_holds_for_independent_rows(self) -> None:
        rows = regressor().jacobian
        formula = rows.T @ np.linalg.inv(rows @ rows.T) @ rows
        np.testing.assert_allclose(formula, oracle.image_projector(rows), atol=1e-9)

    def test_has_no_inverse_for_an_example_that_occurs_twice(self) -> None:
        rows = regressor().jacobian[[0, 0, 1]]
        with pytest.raises(np.linalg.LinAlgError):
            np.linalg.inv(rows @ rows.T)
        formula = rows.T @ np.linalg.pinv(rows @ rows.T, rcond=1e-12) @ rows  # what holds instead
        np.testing.assert_allclose(formula, oracle.image_projector(rows), atol=1e-10)
        matrix = projection_of(ExactDual(), rows)
        np.testing.assert_allclose(matrix, oracle.kernel_projector(rows), atol=1e-10)
