"""Lemma 3.2: the variance at a test point is positive when its rows raise the rank, and (not stated) only then."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nullbayes.errors import CollapseWarning
from nullbayes.projectors import ExactPrimal, Projector
from support.paper import oracle
from support.paper.fitting import EXACT, name_of, projected
from support.paper.networks import Trained, classifier, gaussian, mlp, regressor, squared_error, underparametrized

networks = pytest.mark.parametrize("network", [classifier, regressor], ids=name_of)
exact_projectors = pytest.mark.parametrize("projector", EXACT, ids=name_of)


def rank_grows(trained: Trained, x: Tensor) -> bool:
    rows = trained.jacobian
    return oracle.rank(np.concatenate([rows, oracle.jacobian(trained.model, x[None])])) > oracle.rank(rows)


@networks
@exact_projectors
def test_variance_is_positive_where_the_rank_grows(network: Callable[[], Trained], projector: Projector) -> None:
    trained = network()
    posterior = projected(trained, projector)
    exact = posterior.functional_variance(trained.new, exact=True).cpu().numpy()
    rows = oracle.jacobian(trained.model, trained.new)
    expected = oracle.output_variance(rows, oracle.projected_covariance(trained.jacobian, 1.0), trained.n_outputs)
    np.testing.assert_allclose(exact, expected, rtol=1e-8)
    assert all(rank_grows(trained, x) for x in trained.new)
    assert exact.sum(1).min() > 1e-3
    assert posterior.predict(trained.new).variance.sum(1).min() > 1e-3


@networks
def test_variance_is_zero_at_a_copy_of_a_training_point(network: Callable[[], Trained]) -> None:
    trained = network()
    copy = trained.x[3].clone()
    assert not rank_grows(trained, copy)
    assert projected(trained).functional_variance(copy[None], exact=True).max() < 1e-16


def linear_model(n_inputs: int, n_outputs: int) -> nn.Module:
    return mlp(n_inputs, n_outputs, seed=20, bias=False)


def test_variance_is_zero_at_a_new_point_in_the_row_space() -> None:
    """A linear model has x itself for a row: a combination of training inputs is known, however far away it lies."""
    x = gaussian(4, 9, seed=21)
    trained = Trained(linear_model(9, 1), x, gaussian(4, 1, seed=22), x, "regression", squared_error)
    posterior = projected(trained)
    known, unknown = 50 * x[0] - 30 * x[2], gaussian(9, seed=23)
    assert not rank_grows(trained, known)
    assert rank_grows(trained, unknown)
    assert posterior.functional_variance(known[None], exact=True).max() < 1e-16
    assert posterior.functional_variance(unknown[None], exact=True).min() > 0.1


class _TwoHeads(nn.Module):
    """Two outputs that share nothing: each sees its own half of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear_model(3, 1), linear_model(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x[:, :3]), self.second(x[:, 3:])], dim=1)


def test_variance_of_a_single_output_may_stay_zero() -> None:
    """The lemma's variance is the sum over outputs: a larger rank makes one of them positive, not each."""
    x = gaussian(2, 6, seed=24)
    trained = Trained(_TwoHeads(), x, gaussian(2, 2, seed=25), x, "regression", squared_error)
    test_point = torch.cat([x[0, :3], gaussian(3, seed=26)])
    assert rank_grows(trained, test_point)
    known, unknown = projected(trained).functional_variance(test_point[None], exact=True)[0]
    assert known < 1e-16
    assert unknown > 0.1


class TestWithoutOverparametrization:
    """The rank cannot exceed P: with P independent rows the variance is zero everywhere, far from the data too."""

    def test_variance_is_zero_everywhere_when_the_rank_is_the_number_of_parameters(self) -> None:
        trained = underparametrized()
        assert oracle.rank(trained.jacobian) == oracle.parameters(trained.model).size
        with pytest.warns(CollapseWarning):
            posterior = projected(trained, ExactPrimal())
        assert not any(rank_grows(trained, x) for x in trained.new)
        assert posterior.functional_variance(trained.new, exact=True).max() < 1e-16

    def test_a_kernel_need_not_give_any_variance(self) -> None:
        """Rescaling a ReLU unit changes no prediction: its direction lies in the kernel of every input's rows."""
        base = underparametrized()
        model = mlp(2, 4, 2, seed=27, activation=nn.ReLU)
        trained = replace(base, model=model)
        assert oracle.rank(trained.jacobian) == 22 - 4  # a dimension for each hidden unit
        posterior = projected(trained, ExactPrimal())
        assert posterior.report.kernel_dimension == 4
        assert posterior.functional_variance(base.new, exact=True).max() < 1e-16


class TestProof:
    """The appendix drops the cross terms of W_j W_j⊤ and squares of singular values; its conclusion stands."""

    def test_cross_terms_do_not_vanish(self) -> None:
        basis = np.linalg.qr(gaussian(6, 6, seed=28).cpu().numpy())[0].T[:3]  # V_1 … V_D
        beta = np.array([0.6, 0.0, 0.8])
        w = beta @ basis
        printed = basis.T @ np.diag(beta**2) @ basis
        assert np.linalg.norm(np.outer(w, w) - printed) == pytest.approx(np.sqrt(2) * 0.6 * 0.8)

    def test_conclusion_holds_without_them(self) -> None:
        """J_D⊤J_D + J_T⊤J_T = V (Σ² + C⊤C) V⊤ for J_T = C V⊤, and the middle matrix is positive definite."""
        rows = classifier().jacobian
        _, sigma, right = np.linalg.svd(rows, full_matrices=False)
        coefficients = gaussian(3, 60, seed=29).cpu().numpy()
        inside = coefficients @ right
        both = np.concatenate([rows, inside])
        middle = np.diag(sigma**2) + coefficients.T @ coefficients
        np.testing.assert_allclose(both.T @ both, right.T @ middle @ right, atol=1e-10)
        assert np.linalg.eigvalsh(middle).min() >= sigma.min() ** 2 * (1 - 1e-9)
        assert oracle.rank(both) == oracle.rank(rows)
