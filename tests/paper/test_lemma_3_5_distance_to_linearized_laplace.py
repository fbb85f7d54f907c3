"""Lemma 3.5: linearized Laplace and the projected posterior differ by at most 1/(τ + α), and k/(τ + α) in W₂²."""

from collections.abc import Callable

import numpy as np
import pytest

from support.paper import oracle
from support.paper.fitting import name_of, projected
from support.paper.networks import Trained, classifier, regressor, underparametrized

linalg = pytest.importorskip("scipy.linalg")

each_alpha = pytest.mark.parametrize("alpha", [1e-2, 1.0, 1e2])
networks = pytest.mark.parametrize("network", [classifier, regressor, underparametrized], ids=name_of)


def eigenvalues(trained: Trained) -> oracle.Matrix:
    """The non-zero eigenvalues of the Gauss-Newton matrix, largest first; the last is τ."""
    rows = trained.jacobian
    return np.linalg.svd(rows, compute_uv=False)[: oracle.rank(rows)] ** 2


def covariances(trained: Trained, alpha: float) -> tuple[oracle.Matrix, oracle.Matrix]:
    rows = trained.jacobian
    return oracle.laplace_covariance(rows, alpha), oracle.projected_covariance(rows, alpha)


def wasserstein_squared(regular: oracle.Matrix, other: oracle.Matrix) -> float:
    """W₂² of two Gaussians of the same mean (Bures); SciPy's square root is for regular matrices."""
    root = linalg.sqrtm(regular)
    cross = np.sqrt(np.linalg.eigvalsh(root @ other @ root).clip(0)).sum()
    return float(np.trace(regular + other) - 2 * cross)


@each_alpha
@networks
def test_spectral_distance_is_one_over_tau_plus_alpha(network: Callable[[], Trained], alpha: float) -> None:
    """The bound is an equality."""
    trained = network()
    laplace, projection = covariances(trained, alpha)
    distance = np.linalg.norm(laplace - projection, 2)
    assert distance == pytest.approx(1 / (eigenvalues(trained)[-1] + alpha), rel=1e-8)


@each_alpha
@networks
def test_wasserstein_distance_is_bounded(network: Callable[[], Trained], alpha: float) -> None:
    trained = network()
    spectrum = eigenvalues(trained)
    distance = wasserstein_squared(*covariances(trained, alpha))
    assert distance == pytest.approx((1 / (spectrum + alpha)).sum(), rel=1e-5)
    assert distance <= len(spectrum) / (spectrum[-1] + alpha) * (1 + 1e-5)


@each_alpha
@networks
def test_product_in_the_proof_is_the_scaled_projection(network: Callable[[], Trained], alpha: float) -> None:
    """Σ₂^½ Σ₁ Σ₂^½ = α⁻² (I - 𝒫): Laplace is isotropic on the kernel."""
    trained = network()
    laplace, projection = covariances(trained, alpha)
    root = projection * alpha**0.5  # of a projection divided by α
    np.testing.assert_allclose(root @ root, projection, atol=1e-9 / alpha)
    np.testing.assert_allclose(root @ laplace @ root, projection / alpha, atol=1e-9 / alpha**2)


@each_alpha
@pytest.mark.parametrize("network", [classifier, regressor], ids=name_of)
def test_variances_of_outputs_differ_accordingly(network: Callable[[], Trained], alpha: float) -> None:
    """0 ≤ Var_LLA - Var_proj ≤ |J(x)|²/(τ + α), with the library's exact variance."""
    trained = network()
    rows = oracle.jacobian(trained.model, trained.new)
    laplace = oracle.output_variance(rows, covariances(trained, alpha)[0], trained.n_outputs)
    posterior = projected(trained, prior_precision=alpha)
    excess = laplace - posterior.functional_variance(trained.new, exact=True).cpu().numpy()
    squared = (rows**2).sum(1).reshape(excess.shape)
    assert (excess >= -1e-9 * laplace).all()
    assert (excess <= squared / (eigenvalues(trained)[-1] + alpha)).all()
