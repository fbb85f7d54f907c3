"""Theorem 3.3: bounds on the variance that linearized Laplace keeps on the training data.

The variance is the trace over the O outputs; λ and γ are the extreme singular values of the Jacobian of all data. The
upper bound always holds. The lower bound needs independent rows: it uses that the left singular vectors of non-zero
singular values resolve the identity, Σ w_j w_j⊤ = I.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.paper import oracle
from support.paper.fitting import name_of, projected
from support.paper.networks import Trained, classifier, gaussian, mlp, regressor, squared_error, underparametrized

each_alpha = pytest.mark.parametrize("alpha", [1e-4, 1e-2, 1.0, 1e2, 1e4])
independent_rows = pytest.mark.parametrize("network", [classifier, regressor], ids=name_of)
SLACK = 1e-9  # relative, for rounding


def training_variance(trained: Trained, alpha: float) -> oracle.Matrix:
    """The trace over outputs of J(x_n) (J⊤J + α I)⁻¹ J(x_n)⊤, for each training point."""
    rows = trained.jacobian
    return oracle.output_variance(rows, oracle.laplace_covariance(rows, alpha), trained.n_outputs).sum(1)


def singular_values(trained: Trained) -> oracle.Matrix:
    """All non-zero singular values of the Jacobian, largest first."""
    rows = trained.jacobian
    return np.linalg.svd(rows, compute_uv=False)[: oracle.rank(rows)]


def printed_bound(trained: Trained, singular_value: float, alpha: float) -> float:
    return trained.n_outputs * singular_value**2 / (singular_value**2 + alpha)


@each_alpha
@pytest.mark.parametrize("network", [classifier, regressor, underparametrized], ids=name_of)
def test_upper_bound_holds(network: Callable[[], Trained], alpha: float) -> None:
    trained = network()
    bound = printed_bound(trained, singular_values(trained)[0], alpha)
    assert training_variance(trained, alpha).max() <= bound * (1 + SLACK)


@each_alpha
@independent_rows
def test_lower_bound_holds_for_independent_rows(network: Callable[[], Trained], alpha: float) -> None:
    trained = network()
    assert oracle.rank(trained.jacobian) == len(trained.x) * trained.n_outputs
    bound = printed_bound(trained, singular_values(trained)[-1], alpha)
    assert bound > 0
    assert training_variance(trained, alpha).min() >= bound * (1 - SLACK)


@independent_rows
def test_linearized_laplace_varies_on_training_data_where_the_projected_posterior_does_not(
    network: Callable[[], Trained],
) -> None:
    trained = network()
    exact = projected(trained).functional_variance(trained.x, exact=True).sum(1).cpu().numpy()
    assert (exact < 1e-12 * training_variance(trained, alpha=1.0)).all()


class TestLowerBoundAsPrintedFailsForDependentRows:
    """The appendix reads γ as the root of the smallest *non-zero* eigenvalue; then the bound is too large."""

    def test_more_rows_than_parameters(self) -> None:
        trained, alpha = underparametrized(), 1e-4
        sigma, variance = singular_values(trained), training_variance(trained, alpha)
        assert len(sigma) == 22  # of 160 rows: the smallest singular value of this matrix, in the usual sense,
        bound = printed_bound(trained, sigma[-1], alpha)  # is not zero
        assert bound > 1.99
        assert (variance < bound).all()  # at every training point
        assert variance.mean() <= 22 / 80 < 0.15 * bound

    def test_an_example_that_occurs_twice(self) -> None:
        """J = (j; j): σ² = 2|j|², and the variance |j|²/(2|j|² + α) is half of the printed bound, exactly."""
        base = regressor()
        trained = replace(base, x=base.x[:1].repeat(2, 1), y=base.y[:1].repeat(2, 1))
        (sigma,) = singular_values(trained)
        bound = printed_bound(trained, sigma, alpha=0.3)
        np.testing.assert_allclose(training_variance(trained, alpha=0.3), bound / 2, rtol=1e-10)


def test_variance_is_not_positive_where_the_jacobian_vanishes() -> None:
    """ "On any training datapoint is positive": not at the origin of a network without biases."""
    x = torch.cat([torch.zeros(1, 3, dtype=torch.float64), gaussian(5, 3, seed=30)])
    trained = Trained(mlp(3, 8, 1, seed=31, bias=False), x, gaussian(6, 1, seed=32), x, "regression", squared_error)
    variance = training_variance(trained, alpha=1.0)
    assert variance[0] == 0
    assert variance[1:].min() > 0.01


@each_alpha
@pytest.mark.parametrize("network", [classifier, regressor, underparametrized], ids=name_of)
def test_bounds_by_the_length_of_the_own_rows_always_hold(network: Callable[[], Trained], alpha: float) -> None:
    """|J(x)|²/(λ² + α) ≤ Var ≤ |J(x)|²/α, of any rank and at any input, not only of the training data."""
    trained = network()
    rows, largest = trained.jacobian, singular_values(trained)[0]
    everywhere = torch.cat([trained.x, trained.new])
    own = oracle.jacobian(trained.model, everywhere)
    covariance = oracle.laplace_covariance(rows, alpha)
    variance = oracle.output_variance(own, covariance, trained.n_outputs).sum(1)
    squared = (own**2).sum(1).reshape(-1, trained.n_outputs).sum(1)
    assert (variance >= squared / (largest**2 + alpha) * (1 - SLACK)).all()
    assert (variance <= squared / alpha * (1 + SLACK)).all()


@each_alpha
@pytest.mark.parametrize("network", [classifier, regressor, underparametrized], ids=name_of)
def test_total_variance_is_the_effective_number_of_parameters(network: Callable[[], Trained], alpha: float) -> None:
    """Σ_n Var = Σ_j σ_j²/(σ_j² + α): over N points on average at least rank/N · γ²/(γ² + α), of any rank."""
    trained = network()
    sigma = singular_values(trained)
    total = training_variance(trained, alpha).sum()
    np.testing.assert_allclose(total, (sigma**2 / (sigma**2 + alpha)).sum(), rtol=1e-8)
    assert total >= len(sigma) * sigma[-1] ** 2 / (sigma[-1] ** 2 + alpha)
