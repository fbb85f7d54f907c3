"""Lemma 4.2: the kernel of the loss gradients contains that of the Jacobian; for one output they need not be equal."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes.projectors import Projector
from support.paper import oracle
from support.paper.fitting import EXACT, loss_projected, name_of
from support.paper.networks import (
    Trained,
    classifier,
    gaussian,
    mlp,
    regressor,
    squared_error,
    train,
    underparametrized,
)


@cache
def exactly_fitted() -> Trained:
    """A regression whose first example has no residual, whatever the rounding: f(0) is the last bias, and so is y."""
    x = torch.cat([torch.zeros(1, 3, dtype=torch.float64), gaussian(9, 3, seed=40)])
    y = torch.sin(x.sum(1, keepdim=True)) + 0.3
    hidden, last = mlp(3, 8, seed=41, bias=False), mlp(8, 1, seed=42)
    model = nn.Sequential(hidden, nn.Tanh(), last)
    train(model, x, y, squared_error, steps=20)
    y[0] = model(x[:1]).detach()[0]
    return Trained(model, x, y, x, "regression", squared_error)


@pytest.mark.parametrize("network", [classifier, regressor, underparametrized, exactly_fitted], ids=name_of)
def test_kernel_of_the_jacobian_lies_in_that_of_the_loss_gradients(network: Callable[[], Trained]) -> None:
    trained = network()
    inside = trained.loss_gradients @ oracle.kernel_projector(trained.jacobian)
    assert np.linalg.norm(inside) < 1e-9 * np.linalg.norm(trained.loss_gradients)


def test_kernel_of_the_loss_gradients_is_larger_for_several_outputs() -> None:
    trained = classifier()
    assert oracle.rank(trained.loss_gradients) == 20 < oracle.rank(trained.jacobian) == 60
    variance = loss_projected(trained).functional_variance(trained.x, exact=True)
    assert (variance.amax(1) > 0).all()  # what the loss does not see may vary on the training data, too


class TestOneOutput:
    """J^L = diag(∂l/∂f) J: the same row space if no derivative vanishes, and only then if rows are independent."""

    def test_kernels_are_equal_if_every_loss_gradient_is_nonzero(self) -> None:
        trained = regressor()
        residuals = (trained.model(trained.x) - trained.y).detach().cpu().numpy()
        assert np.abs(residuals).min() > 1e-6
        np.testing.assert_allclose(trained.loss_gradients, residuals * trained.jacobian, atol=1e-12)
        unit = trained.loss_gradients / np.linalg.norm(trained.loss_gradients, axis=1, keepdims=True)
        np.testing.assert_allclose(oracle.kernel_projector(unit), oracle.kernel_projector(trained.jacobian), atol=1e-8)

    def test_kernels_differ_if_an_example_is_fitted_exactly(self) -> None:
        trained = exactly_fitted()
        assert (trained.loss_gradients[0] == 0).all()
        assert np.linalg.norm(trained.jacobian[0]) > 0.5
        assert oracle.rank(trained.jacobian) == 10
        assert oracle.rank(trained.loss_gradients) == 9

    @pytest.mark.parametrize("projector", EXACT, ids=name_of)
    def test_loss_projected_posterior_then_varies_at_that_example_only(self, projector: Projector) -> None:
        trained = exactly_fitted()
        posterior = loss_projected(trained, projector)
        variance = posterior.functional_variance(trained.x, exact=True)[:, 0].cpu().numpy() * posterior.prior_precision
        rows = trained.jacobian
        assert posterior.report.kernel_dimension == rows.shape[1] - 9
        expected = rows[0] @ oracle.kernel_projector(rows[1:]) @ rows[0]
        assert expected > 1e-3
        assert variance[0] == pytest.approx(expected, rel=1e-6)
        assert variance[1:].max() < 1e-10 * expected

    def test_a_zero_gradient_does_no_harm_if_the_row_is_a_combination_of_others(self) -> None:
        """So the condition is sufficient, and necessary only for independent rows."""
        base = exactly_fitted()
        both = Trained(
            base.model, torch.cat([base.x, base.x[:1]]), torch.cat([base.y, base.y[:1] + 1]), base.x, "regression",
            squared_error,
        )  # fmt: skip
        assert (both.loss_gradients[0] == 0).all()
        assert oracle.rank(both.loss_gradients) == oracle.rank(both.jacobian) == 10


def test_library_forms_a_zero_row_for_an_example_that_is_fitted_exactly() -> None:
    trained = exactly_fitted()
    rows = nb.LossJacobian(trained.model, trained.loader, "regression").dense()
    assert (rows[0] == 0).all()
    assert (rows[1:].norm(dim=1) > 0).all()
