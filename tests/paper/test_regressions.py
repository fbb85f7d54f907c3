"""Faults that the library once had, found by the tests of the paper: they stay mended."""

import numpy as np
import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Alternating, Krylov
from support.paper import oracle
from support.paper.networks import regressor


def test_krylov_continues_while_its_residual_only_pauses() -> None:
    """The residual of conjugate gradients need not fall at every step: here it pauses from sweep 4 to 18."""
    rows = regressor().jacobian
    projector = Krylov(Alternating(block_rows=13), rtol=1e-9)
    state = projector.prepare(nb.DenseRows(torch.as_tensor(rows)))
    projection = projector.apply(state, torch.eye(rows.shape[1], dtype=torch.float64)[27:28])
    assert projection.info.converged.all()
    np.testing.assert_allclose(projection.directions[0].cpu().numpy(), oracle.kernel_projector(rows)[27], atol=1e-8)


@pytest.mark.parametrize("margin", [12.0, 16.0, 20.0, 60.0])
def test_loss_rows_of_confident_examples_point_the_right_way(margin: float) -> None:
    """∂l/∂f = p - e_y: with p_y - 1 rounded, its direction in float32 is off by 0.3 % at a margin of 12, 88 % at 18."""
    model = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[margin, 0.0], [0.0, 0.0], [-1.0, 0.0]]))
    x, y = torch.tensor([[1.0, 0.5], [1.0, -0.25]]), torch.tensor([0, 0])
    row = nb.LossJacobian(model, [(x, y)], "classification").dense()[0].double().cpu().numpy()
    others = np.exp(np.array([0.0, -1.0]) - margin) / (1 + np.exp(np.array([0.0, -1.0]) - margin).sum())
    exact = np.outer([-others.sum(), *others], [1.0, 0.5]).ravel()
    np.testing.assert_allclose(row / np.linalg.norm(row), exact / np.linalg.norm(exact), atol=1e-6)


def test_slow_progress_is_not_taken_for_rounding() -> None:
    """Two rows at an angle of 0.01: a sweep contracts by 1 - 1e-4, and larger blocks would help, not float64."""
    rows = torch.tensor([[1.0, 0.0, 0.0], [np.cos(0.01), np.sin(0.01), 0.0]], dtype=torch.float64)
    projector = Alternating(block_rows=1, rtol=1e-2, max_sweeps=200, shift=0.0)
    noise = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)
    with pytest.warns(ConvergenceWarning):
        projection = projector.apply(projector.prepare(nb.DenseRows(rows)), noise)
    assert float(projection.info.residual) == pytest.approx(np.cos(0.01) ** 399, rel=1e-6)  # as Lemma 4.1 has it
    assert projection.info.sweeps == 200
    assert "block_rows" in projection.info.outcome.value
