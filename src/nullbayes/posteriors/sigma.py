r"""The noise of a regression, from training residuals and the degrees of freedom that the network spent on them.

A network that has fitted its training data leaves residuals that are smaller than the noise. The linearized network
says by how much: with :math:`\lambda_i` the eigenvalues of :math:`J J^\top`, ridge regression spends

.. math:: \gamma = \sum_i \frac{\lambda_i}{\lambda_i + \sigma^2 \alpha}, \qquad \alpha = \gamma / \|\theta\|^2,

degrees of freedom (MacKay 1992), and generalized cross-validation (Craven and Wahba 1979) estimates the error on new
data as the root mean square residual over :math:`1 - \gamma / R`, for R targets.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from nullbayes import priors
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Likelihood, Regression

_MOST_SPENT = 0.95  # of the targets: residuals that are all but gone say nothing about the noise
_ROUNDS = 500


def with_noise(given: Likelihood, rows: JacobianRows) -> Likelihood:
    """Return the likelihood of the rows; for a regression whose noise nobody gave, with an estimate of it."""
    fitted = rows.likelihood
    if not isinstance(fitted, Regression) or not isinstance(given, Regression) or given.sigma_noise is not None:
        return fitted
    assert fitted.sigma_noise is not None
    plain = rows if isinstance(rows, OutputJacobian) and not rows.hessian else None
    if plain is None:
        plain = OutputJacobian(rows.network, rows.examples, fitted)
    values, weights = priors.spectrum(plain, torch.Generator().manual_seed(0))
    theta_squared = float(rows.network.theta.double().square().sum())
    spent = degrees_of_freedom(values, weights, plain.n_rows, fitted.sigma_noise, theta_squared)
    return replace(fitted, sigma_noise=fitted.sigma_noise / (1.0 - min(spent / plain.n_rows, _MOST_SPENT)))


def degrees_of_freedom(eigenvalues: Tensor, weights: Tensor, n_targets: int, rms: float, theta_squared: float) -> float:
    r"""Return :math:`\gamma` at the fixed point of precision and noise, for a root mean square residual.

    The noise of the fixed point is :math:`\sigma^2 = \mathrm{RSS} / (R - \gamma)`. The iteration starts from all
    directions spent, so that it ends in the largest fixed point.
    """
    if rms <= 0.0 or theta_squared <= 0.0:
        return 0.0
    gamma = min(float(weights[eigenvalues > 0].sum()), _MOST_SPENT * n_targets)
    for _ in range(_ROUNDS):
        ridge = (rms**2 * n_targets / (n_targets - gamma)) * gamma / theta_squared
        new = min(float((weights * eigenvalues / (eigenvalues + ridge)).sum()), _MOST_SPENT * n_targets)
        if math.isclose(new, gamma, rel_tol=1e-6) or new <= 0.0:
            return new
        gamma = new
    return gamma
