"""Section 3: samples of the projected posterior are N(θ, (I - J⁺J)/α)."""

import numpy as np
import pytest

from support.paper import oracle
from support.paper.fitting import projected
from support.paper.networks import regressor


def test_samples_have_the_stated_mean_and_covariance() -> None:
    trained, alpha, n = regressor(), 4.0, 4000
    posterior = projected(trained, n_samples=n, prior_precision=alpha)
    sampled = posterior.sample()
    flat = np.concatenate(
        [sampled[name].reshape(n, -1).cpu().numpy() for name, _ in trained.model.named_parameters()], axis=1
    )
    deviations = flat - oracle.parameters(trained.model)
    expected = oracle.kernel_projector(trained.jacobian) / alpha
    d = round(np.trace(expected) * alpha)
    # The mean has the squared length χ²_d/(nα), the covariance a squared error of about (d² + d)/(nα²).
    assert (deviations.mean(0) ** 2).sum() * n * alpha == pytest.approx(d, abs=5 * (2 * d) ** 0.5)
    error = np.linalg.norm(np.cov(deviations.T) - expected) ** 2
    assert error * n * alpha**2 / (d**2 + d) == pytest.approx(1, abs=0.25)
    assert np.abs(deviations @ trained.jacobian.T).max() < 1e-10  # none of it outside the kernel
