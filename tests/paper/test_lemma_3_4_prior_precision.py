"""Lemma 3.4, corrected: the projected marginal likelihood has its maximum at α* = rank/|θ|²; printed is 1/α*.

-α/2 |θ|² + rank/2 log α has the derivative -|θ|²/2 + rank/(2α).
"""

from collections.abc import Callable

import numpy as np
import pytest

from nullbayes.projectors import Projector
from support.paper import oracle
from support.paper.fitting import EXACT, loss_projected, name_of, projected
from support.paper.networks import Trained, classifier, regressor

optimize = pytest.importorskip("scipy.optimize")

networks = pytest.mark.parametrize("network", [classifier, regressor], ids=name_of)


def squared_norm(trained: Trained) -> float:
    return float((oracle.parameters(trained.model) ** 2).sum())


def projected_evidence(alpha: float, rank: int, theta_squared: float) -> float:
    return -0.5 * alpha * theta_squared + 0.5 * rank * np.log(alpha)


def maximizer(objective: Callable[[float], float]) -> float:
    """The α between 1e-12 and 1e12 at which an objective is largest."""
    found = optimize.minimize_scalar(
        lambda log: -objective(np.exp(log)), bounds=(-27.6, 27.6), method="bounded", options={"xatol": 1e-10}
    )
    return float(np.exp(found.x))


def laplace_evidence(alpha: float, rows: oracle.Matrix, theta_squared: float) -> float:
    """Section 3, "Tractable model selection": log p(θ|α) - ½ log det(J⊤J + αI), up to what does not depend on α."""
    n = rows.shape[1]
    log_det = np.linalg.slogdet(rows.T @ rows + alpha * np.eye(n))[1]
    return 0.5 * n * np.log(alpha) - 0.5 * alpha * theta_squared - 0.5 * log_det


def mackay_fixed_point(rows: oracle.Matrix, theta_squared: float) -> float:
    """The α with α |θ|² = γ(α), the effective number of parameters Σ λ/(λ + α)."""
    eigenvalues = np.linalg.svd(rows, compute_uv=False) ** 2

    def excess(log: float) -> float:
        return float(np.exp(log) * theta_squared - (eigenvalues / (eigenvalues + np.exp(log))).sum())

    return float(np.exp(optimize.brentq(excess, -30, 30, xtol=1e-13)))


@networks
@pytest.mark.parametrize("projector", EXACT, ids=name_of)
def test_optimal_is_rank_over_squared_norm(network: Callable[[], Trained], projector: Projector) -> None:
    trained = network()
    rank, squared = oracle.rank(trained.jacobian), squared_norm(trained)
    posterior = projected(trained, projector, prior_precision="optimal")
    assert posterior.prior_precision == pytest.approx(rank / squared, rel=1e-12)
    best = maximizer(lambda alpha: projected_evidence(alpha, rank, squared))
    assert posterior.prior_precision == pytest.approx(best, rel=1e-6)


@networks
def test_rank_of_the_loss_projected_posterior_is_that_of_the_loss_gradients(network: Callable[[], Trained]) -> None:
    trained = network()
    posterior = loss_projected(trained)
    posterior.prior_precision = "optimal"
    expected = oracle.rank(trained.loss_gradients) / squared_norm(trained)
    assert posterior.prior_precision == pytest.approx(expected, rel=1e-12)


@networks
def test_printed_value_is_the_reciprocal_and_no_stationary_point(network: Callable[[], Trained]) -> None:
    trained = network()
    rank, squared = oracle.rank(trained.jacobian), squared_norm(trained)
    posterior = projected(trained, prior_precision="paper")
    printed = posterior.prior_precision
    assert printed == pytest.approx(squared / rank, rel=1e-12)
    slope = -0.5 * squared + 0.5 * rank / printed  # the derivative in the appendix, evaluated there
    assert abs(slope) > 0.1 * squared
    posterior.prior_precision = "optimal"
    assert posterior.prior_precision == pytest.approx(1 / printed, rel=1e-12)
    best = projected_evidence(posterior.prior_precision, rank, squared)
    assert projected_evidence(printed, rank, squared) < best - 0.1


@networks
def test_maximum_is_global(network: Callable[[], Trained]) -> None:
    """The second derivative is negative, as the appendix says: whatever α, the evidence is lower."""
    trained = network()
    rank, squared = oracle.rank(trained.jacobian), squared_norm(trained)
    at_best = projected_evidence(rank / squared, rank, squared)
    grid = rank / squared * np.geomspace(1e-9, 1e9, 400)  # an even number: the maximum itself is not on it
    assert (projected_evidence(grid, rank, squared) < at_best).all()


def test_precision_falls_with_the_square_of_the_parameters() -> None:
    """A precision has the unit of 1/θ²; the printed one, in units of θ², would rise instead."""
    rank, squared = 20, 7.0
    best, scaled = (maximizer(lambda alpha, s=s: projected_evidence(alpha, rank, s)) for s in (squared, 100 * squared))
    assert scaled == pytest.approx(best / 100, rel=1e-6)


class TestMacKay:
    """The evidence of linearized Laplace itself has its maximum at γ/|θ|², which tends to rank/|θ|² from below."""

    @networks
    def test_fixed_point_is_the_maximum_of_the_evidence(self, network: Callable[[], Trained]) -> None:
        trained = network()
        rows, squared = trained.jacobian, squared_norm(trained)
        best = maximizer(lambda alpha: laplace_evidence(alpha, rows, squared))
        assert mackay_fixed_point(rows, squared) == pytest.approx(best, rel=1e-5)

    @networks
    def test_fixed_point_tends_to_the_corrected_value_as_the_ggn_grows(self, network: Callable[[], Trained]) -> None:
        trained = network()
        rows, squared = trained.jacobian, squared_norm(trained)
        corrected = oracle.rank(rows) / squared
        scales = np.array([1.0, 1e2, 1e4, 1e6])
        ratios = np.array([mackay_fixed_point(rows * s**0.5, squared) / corrected for s in scales])
        assert (np.diff(ratios) > 0).all()
        assert (ratios < 1).all()
        assert ratios[-1] > 1 - 1e-3
        assert (1 - ratios[-1]) / (1 - ratios[-2]) == pytest.approx(0.01, rel=0.2)  # the gap is of order 1/scale

    def test_library_finds_it_too(self) -> None:
        """The rows of a Gaussian likelihood are over its standard deviation."""
        trained = regressor()
        posterior = projected(trained)
        found = posterior.optimize_prior_precision(trained.loader, method="marglik")
        sigma = posterior.likelihood.sigma_noise
        expected = mackay_fixed_point(trained.jacobian / sigma, squared_norm(trained))
        assert found == pytest.approx(expected, rel=2e-3)
