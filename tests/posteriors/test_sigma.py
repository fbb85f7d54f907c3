"""The noise of a regression: training residuals, corrected for the degrees of freedom that were spent on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from drawing import randn
from models import jacobian
from nullbayes.likelihoods import Regression
from nullbayes.posteriors.sigma import degrees_of_freedom
from posteriors.fitting import each_kind, seeded

NOISE = 0.3


def draw(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    x = randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x[:, :1].sin() + NOISE * randn(n, 1, generator=generator, dtype=torch.float64)


def trained(n: int = 80, width: int = 20, steps: int = 1500) -> nn.Module:
    """A network that fits the noise of its training data."""
    x, y = draw(n)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Generalized cross-validation at the fixed point of MacKay, by dense matrices and plain iteration."""
    rows = jacobian(model, x).flatten(0, 1).detach()
    values = torch.linalg.eigvalsh(rows @ rows.T).clamp_min(0)
    rss, n = float((model(x).detach() - y).square().sum()), len(rows)
    theta = sum(float(p.detach().square().sum()) for p in model.parameters())
    gamma = min(int((values > 0).sum()), 0.95 * n)
    for _ in range(5000):
        ridge = rss / (n - gamma) * gamma / theta
        gamma = min(float((values / (values + ridge)).sum()), 0.95 * n)
    return math.sqrt(rss / n) / (1 - gamma / n)


@each_kind
def test_the_noise_is_that_of_generalized_cross_validation(kind: type, model: nn.Module) -> None:
    x, y = draw(80)
    posterior = kind(model, "regression").fit([(x, y)], 5, generator=seeded(), progress=False)
    assert posterior.likelihood.sigma_noise == pytest.approx(oracle(model, x, y), rel=1e-4)


def test_residuals_that_were_fitted_are_corrected(model: nn.Module) -> None:
    x, y = draw(80)
    residual = float((model(x).detach() - y).square().mean().sqrt())
    posterior = nb.ProjectedPosterior(model, "regression").fit([(x, y)], 30, generator=seeded(), progress=False)
    sigma = posterior.likelihood.sigma_noise
    x, y = draw(2000, seed=1)
    prediction = posterior.predict(x)
    error = float((prediction.mean - y).square().mean().sqrt())
    assert residual < 0.9 * NOISE  # or there would be nothing to correct
    assert abs(sigma - error) < 0.5 * abs(residual - error)
    half = 1.645 * (prediction.variance + sigma**2).sqrt()
    assert 0.8 < float(((prediction.mean - y).abs() < half).double().mean()) < 0.97


@each_kind
def test_noise_that_was_given_stays(kind: type, model: nn.Module) -> None:
    posterior = kind(model, Regression(0.123)).fit([draw(80)], 5, progress=False)
    assert posterior.likelihood.sigma_noise == 0.123


@each_kind
def test_building_the_rows_again_does_not_correct_twice(kind: type, model: nn.Module) -> None:
    posterior = kind(model, "regression").fit([draw(80)], 5, progress=False)
    before = posterior.likelihood
    posterior.release().prepare([draw(80)])
    assert posterior.likelihood == before


def test_scaled_rows_give_the_same_noise(model: nn.Module) -> None:
    plain, scaled = (
        nb.ProjectedPosterior(model, "regression", hessian=hessian).fit([draw(80)], 5, progress=False)
        for hessian in (False, True)
    )
    assert scaled.likelihood.sigma_noise == pytest.approx(plain.likelihood.sigma_noise)


@pytest.mark.parametrize("rms", [1e-12, 1e-3, 1.0, 1e3])
def test_degrees_of_freedom_stay_within_the_targets(rms: float) -> None:
    values = torch.logspace(4, -6, 40, dtype=torch.float64)
    for n in (40, 45, 400):
        gamma = degrees_of_freedom(values, torch.ones(40, dtype=torch.float64), n, rms, 10.0)
        assert 0.0 <= gamma <= min(40.0, 0.95 * n)


def test_no_residuals_and_no_parameters_spend_nothing() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert degrees_of_freedom(one, one, 5, 0.0, 1.0) == degrees_of_freedom(one, one, 5, 1.0, 0.0) == 0.0
