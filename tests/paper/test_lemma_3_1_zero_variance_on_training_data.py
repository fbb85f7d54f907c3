"""Lemma 3.1: the projected posterior is supported on functions that agree with the network on the training data."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import nullbayes as nb
from nullbayes.projectors import Projector
from support.paper import oracle
from support.paper.fitting import EXACT, name_of, projected
from support.paper.networks import Trained, classifier, regressor

NEGLIGIBLE = 1e-16  # of the variance that unprojected noise has

networks = pytest.mark.parametrize("network", [classifier, regressor], ids=name_of)
exact_projectors = pytest.mark.parametrize("projector", EXACT, ids=name_of)


def noise_variance(trained: Trained, alpha: float) -> np.ndarray:
    """The variance (N, O) of the linearized outputs under N(θ, I/α), for scale."""
    return (trained.jacobian**2).sum(1).reshape(-1, trained.n_outputs) / alpha


@networks
@exact_projectors
def test_every_sample_predicts_the_training_data_as_the_network_does(
    network: Callable[[], Trained], projector: Projector
) -> None:
    trained = network()
    posterior = projected(trained, projector)
    change = posterior.predict(trained.x).samples - trained.model(trained.x).detach()
    scale = noise_variance(trained, posterior.prior_precision)
    assert (change.square().amax(0).cpu().numpy() <= NEGLIGIBLE * scale).all()


@networks
@exact_projectors
def test_variance_is_zero_on_training_data(network: Callable[[], Trained], projector: Projector) -> None:
    trained = network()
    posterior = projected(trained, projector)
    scale = noise_variance(trained, posterior.prior_precision)
    assert (posterior.predict(trained.x).variance.cpu().numpy() <= NEGLIGIBLE * scale).all()
    assert (posterior.functional_variance(trained.x, exact=True).cpu().numpy() <= NEGLIGIBLE * scale).all()


@networks
def test_unprojected_noise_would_move_the_predictions(network: Callable[[], Trained]) -> None:
    """What the two tests above measure against is not small itself."""
    trained = network()
    assert noise_variance(trained, 1.0).min() > 1


@networks
def test_network_itself_changes_to_second_order_only(network: Callable[[], Trained]) -> None:
    """The lemma speaks of the linearized network; for f itself half the step leaves a quarter of the change."""
    trained = network()
    posterior = projected(trained)
    changes = []
    for alpha in (1e6, 4e6):
        posterior.prior_precision = alpha
        outputs = posterior.predict(trained.x, pred_type="sampled").samples
        changes.append((outputs - trained.model(trained.x).detach()).square().mean(0).sqrt().cpu().numpy())
    np.testing.assert_allclose(changes[0] / changes[1], 4.0, rtol=0.02)


@exact_projectors
def test_covariance_is_a_projection(projector: Projector) -> None:
    """Section 3: UU⊤ is symmetric, idempotent, its own pseudo-inverse, with eigenvalues 0 and 1."""
    rows = classifier().jacobian
    identity = torch.eye(rows.shape[1], dtype=torch.float64)
    state = projector.prepare(nb.DenseRows(torch.as_tensor(rows)))
    matrix = projector.apply(state, identity).directions.cpu().numpy()
    np.testing.assert_allclose(matrix, oracle.kernel_projector(rows), atol=1e-10)
    np.testing.assert_allclose(matrix, np.eye(rows.shape[1]) - oracle.image_projector(rows), atol=1e-10)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-10)
    np.testing.assert_allclose(matrix @ matrix, matrix, atol=1e-10)
    np.testing.assert_allclose(np.linalg.pinv(matrix, rcond=1e-6), matrix, atol=1e-10)
    eigenvalues = np.linalg.eigvalsh(matrix)
    n_rows = oracle.rank(rows)
    np.testing.assert_allclose(eigenvalues[:n_rows], 0, atol=1e-10)
    np.testing.assert_allclose(eigenvalues[n_rows:], 1, atol=1e-10)


class TestSoftmaxHessianIsNotOnlyNotation:
    """Section 2 takes H for the identity "for notational simplicity"; with the softmax Hessian the lemma fails.

    H = diag(p) - pp⊤ has the kernel span(1), so ker(J⊤HJ) contains every direction that shifts all logits of an
    example alike, and is larger than ker(J).
    """

    def softmax_rows(self) -> np.ndarray:
        """H^½ J, from the eigenvectors of each example's Hessian."""
        trained = classifier()
        jacobian = trained.jacobian.reshape(len(trained.x), trained.n_outputs, -1)
        rows = []
        for p, block in zip(trained.model(trained.x).softmax(1).detach().cpu().numpy(), jacobian, strict=True):
            values, vectors = np.linalg.eigh(np.diag(p) - np.outer(p, p))
            rows.append(np.sqrt(values.clip(0))[1:, None] * (vectors[:, 1:].T @ block))
        return np.concatenate(rows)

    def test_kernel_of_the_ggn_is_larger_than_that_of_the_jacobian(self) -> None:
        jacobian, scaled = classifier().jacobian, self.softmax_rows()
        assert np.linalg.norm(scaled @ oracle.kernel_projector(jacobian)) < 1e-10  # contains it,
        assert oracle.rank(scaled) == 40 < oracle.rank(jacobian) == 60  # and one dimension an example more

    def test_logits_on_training_data_vary_but_not_the_probabilities(self) -> None:
        trained = classifier()
        posterior = projected(trained, prior_precision=1e3, hessian=True)
        samples = posterior.predict(trained.x).samples
        outputs = trained.model(trained.x).detach()
        variance = posterior.functional_variance(trained.x, exact=True).cpu().numpy()
        assert variance.min() > 0.05 * noise_variance(trained, 1e3).max(1).min()
        np.testing.assert_allclose(variance, variance[:, :1] * np.ones(3), rtol=1e-6)  # all logits move alike
        torch.testing.assert_close(samples.softmax(2), outputs.softmax(1).expand_as(samples), rtol=1e-7, atol=1e-8)
