"""Lemma 4.3: under the loss-projected posterior the loss of each training example changes to second order only.

Its variance is then O(α⁻²) for a precision α → ∞; printed is O(α²).
"""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import nullbayes as nb
from support.paper import oracle
from support.paper.fitting import loss_projected, name_of
from support.paper.networks import Trained, classifier, gaussian, regressor

networks = pytest.mark.parametrize("network", [classifier, regressor], ids=name_of)

# With one output the linearized prediction itself cannot change, nor can the loss: see the test of its own.
networks_and_predictions = pytest.mark.parametrize(
    ("network", "pred_type"),
    [(classifier, "linearized"), (classifier, "sampled"), (regressor, "sampled")],
    ids=name_of,
)


def change_of_loss(trained: Trained, outputs: Tensor) -> oracle.Matrix:
    """l(outputs, y_n) - l(f(θ, x_n), y_n) at every training example."""
    return (trained.loss(outputs, trained.y) - trained.loss(trained.model(trained.x), trained.y)).detach().cpu().numpy()


def changes(trained: Trained, posterior: nb.LossProjectedPosterior, alpha: float, pred_type: str) -> oracle.Matrix:
    """The change of the loss of every sample and training example (S, N), at a precision."""
    posterior.prior_precision = alpha
    samples = posterior.predict(trained.x, pred_type=pred_type).samples
    return np.stack([change_of_loss(trained, outputs) for outputs in samples])


def ratio(whole: oracle.Matrix, half: oracle.Matrix) -> oracle.Matrix:
    """How much smaller the second change is, at each example (root mean square over samples)."""
    return np.sqrt((whole**2).mean(0) / (half**2).mean(0))


@networks_and_predictions
def test_half_the_step_leaves_a_quarter_of_the_change(network: Callable[[], Trained], pred_type: str) -> None:
    """With the linearized network and with the network itself, at every example."""
    trained = network()
    posterior = loss_projected(trained)
    whole, half = (changes(trained, posterior, alpha, pred_type) for alpha in (1e7, 4e7))
    np.testing.assert_allclose(ratio(whole, half), 4, rtol=0.05)


def test_linearized_loss_of_one_output_does_not_change_at_all() -> None:
    trained = regressor()
    assert np.abs(changes(trained, loss_projected(trained), 1.0, "linearized")).max() < 1e-10


@networks
def test_unprojected_noise_changes_the_loss_to_first_order(network: Callable[[], Trained]) -> None:
    """Without the projection, half the step leaves half the change."""
    trained = network()
    model = copy.deepcopy(trained.model)
    theta = parameters_to_vector(model.parameters()).detach()
    noise = gaussian(20, len(theta), seed=50)
    measured = []
    for alpha in (1e14, 4e14):  # small enough for examples that are fitted to 1e-5
        losses = []
        for direction in noise:
            vector_to_parameters(theta + direction / alpha**0.5, model.parameters())
            losses.append(change_of_loss(trained, model(trained.x)))
        measured.append(np.stack(losses))
    np.testing.assert_allclose(ratio(*measured), 2, rtol=0.05)


class TestVariance:
    @networks_and_predictions
    def test_slope_against_the_precision_is_minus_two(self, network: Callable[[], Trained], pred_type: str) -> None:
        trained = network()
        posterior = loss_projected(trained)
        alphas = np.geomspace(1e5, 1e8, 4)
        variances = np.stack([changes(trained, posterior, alpha, pred_type).var(0, ddof=1) for alpha in alphas])
        slopes = np.polyfit(np.log(alphas), np.log(variances), 1)[0]
        np.testing.assert_allclose(slopes, -2, atol=0.05)

    def test_printed_bound_would_vanish_where_the_variance_grows(self) -> None:
        """As α → 0 the samples spread without end; O(α²) would have the loss fixed there."""
        trained = classifier()
        posterior = loss_projected(trained)
        wide, narrow = (changes(trained, posterior, alpha, "linearized").var(0).max() for alpha in (1.0, 1e4))
        assert wide > 100 * narrow


def test_first_order_term_of_the_proof_is_in_the_outputs() -> None:
    """The appendix expands l by ∇_f l · (l(f) - l(f_MAP)), a vector; it has to be ∇_f l · (f - f_MAP)."""
    trained = classifier()
    outputs = trained.model(trained.x[:1]).detach().requires_grad_()
    gradient = torch.autograd.grad(trained.loss(outputs, trained.y[:1]).sum(), outputs)[0]
    step = 1e-6 * torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    change = (trained.loss(outputs + step, trained.y[:1]) - trained.loss(outputs, trained.y[:1])).detach()
    assert change.item() == pytest.approx(float((gradient * step).sum()), rel=1e-4)
    assert (gradient * change).shape == outputs.shape  # as printed: not a number
