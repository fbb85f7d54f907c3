r"""The prior precision :math:`\alpha`, chosen by held-out likelihood, by marginal likelihood, or by its closed form.

A sample is :math:`\theta + v/\sqrt\alpha`, and the direction :math:`v` does not depend on :math:`\alpha`, so that a new
precision needs no new projection.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import SettingsError, warn
from nullbayes.jacobian.batches import is_array
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.likelihoods import Likelihood
from nullbayes.linalg.curvature import Dual, Primal, estimated_spectrum
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors.checking import counted_outputs
from nullbayes.posteriors.measured import closed_form
from nullbayes.posteriors.promise import ScaledPredictions
from nullbayes.precision import full_precision

METHODS = ("nll", "grid", "marglik", "closed_form")
GRID = (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)  # of the paper
CONFIDENT = "precision and temperature that suit them are too confident for new data"
_DENSE_SPECTRUM = 3_000  # largest min(R, P) for which all eigenvalues are computed
_DECADES = 8.0  # range of the search on either side of the start


@full_precision()
def optimize_prior_precision(self: Any, loader: Any = None, method: str = "nll") -> float:
    """Choose the prior precision, set it and return it; see :meth:`tune` for precision and temperature together.

    Parameters
    ----------
    loader : iterable of batches or pair (inputs, targets), optional
        Held-out data for "nll" and "grid", the training data for "marglik"; "closed_form" needs none.
    method : "nll", "grid", "marglik" or "closed_form"
        The best log-likelihood of the mean prediction on the data, among all numbers or among the paper's 0.1, 1,
        5, 10, 50 and 100; the optimum of the marginal likelihood of linearized Laplace, with the Gauss-Newton
        matrix proper; or the optimum of the projected marginal likelihood.

    Returns
    -------
    float
        The precision, which is now in use.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    >>> y = x[:, :1] + 0.1 * x.roll(7, 0)[:, 1:]
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.tensor([[1.0], [0.0]])})
    >>> posterior = nb.baselines.DiagonalLaplace(model, "regression").fit(x[:100], y[:100])
    >>> posterior.optimize_prior_precision((x[100:], y[100:]), "grid") in (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)
    True
    """
    self._check_fitted()
    best = _best_precision(self, check_method(loader, method), loader)
    self._precision = self._precision_rule = best  # a new fit goes by the rule that was given
    return best


def _best_precision(posterior: Any, method: str, loader: Any) -> float:
    if method == "closed_form":
        closed: float = posterior._need_measured().closed_form(posterior._network.whole.theta)
        return closed
    if method == "marglik":
        return _best_on_training_data(posterior, loader)
    found = answers_on(posterior._likelihood, *posterior._evaluate(loader, CONFIDENT))
    if method == "grid":
        return best_of_grid(lambda alpha: -found.nll(alpha))
    start = posterior.prior_precision
    with contextlib.suppress(SettingsError):  # an earlier choice must not change the answer
        start = posterior._resolve_precision("optimal")
    return maximize(lambda alpha: -found.nll(alpha), start, "held-out likelihood")


def check_method(loader: Any, method: str) -> str:
    """Return the name of a method that chooses a precision, or refuse one that is unknown or lacks its data."""
    if is_array(method):
        msg = "Inputs and targets are passed as one pair here: optimize_prior_precision((x, y))."
        raise SettingsError(msg)
    if method not in METHODS:
        msg = f"method must be one of {', '.join(METHODS)}, not {method!r}."
        raise SettingsError(msg)
    if loader is None and method in ("nll", "grid"):
        msg = f"method={method!r} needs held-out data: optimize_prior_precision(held_out, {method!r})."
        raise SettingsError(msg)
    return method


def answers_on(likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor) -> ScaledPredictions:
    """Return predictions on held-out data at any precision; refuse data of which every target is ignored."""
    counted_outputs(likelihood, outputs, targets)
    return ScaledPredictions(likelihood, outputs, changes, targets)


def best_of_grid(objective: Callable[[float], float]) -> float:
    """Return the number of the paper's grid at which an objective is largest."""
    values = {alpha: objective(alpha) for alpha in GRID}
    return max(values, key=lambda alpha: values[alpha] if math.isfinite(values[alpha]) else -math.inf)


def maximize(objective: Callable[[float], float], start: float, what: str) -> float:
    """Return the precision that maximizes a function, by a grid of half decades around ``start`` and golden section."""
    grid = [math.log(start) + math.log(10.0) * 0.5 * i for i in range(int(-2 * _DECADES), int(2 * _DECADES) + 1)]
    values = [objective(math.exp(point)) for point in grid]
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    if not finite:
        msg = (
            f"The {what} is not finite for any prior precision "
            f"between {math.exp(grid[0]):.2g} and {math.exp(grid[-1]):.2g}."
        )
        raise SettingsError(msg)
    best = max(finite, key=lambda i: values[i])
    if best in (0, len(grid) - 1):
        message = (
            f"The {what} is still rising at the edge of the search, "
            f"at a prior precision of {math.exp(grid[best]):.2g}: the data do not determine it. The edge is used."
        )
        warn(message)
        return math.exp(grid[best])
    return math.exp(golden_section(lambda point: -objective(math.exp(point)), grid[best - 1], grid[best + 1]))


def golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a function with one valley between two numbers, to about 1e-3."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-3:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return 0.5 * (low + high)


def _best_on_training_data(posterior: Any, loader: Any) -> float:
    """Return the precision of the largest marginal likelihood of linearized Laplace."""
    if loader is None:
        msg = 'method="marglik" reads the training data: pass them, optimize_prior_precision(loader, "marglik").'
        raise SettingsError(msg)
    network = posterior._network.whole
    network.check_unchanged()
    rows = OutputJacobian(network, loader, posterior._likelihood, hessian=True, batch_fn=posterior._batch_fn)
    found = spectrum(rows, torch.Generator().manual_seed(0))
    return best_evidence(*found, float(network.theta.double().square().sum()))


def spectrum(rows: Rows, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Return eigenvalues of :math:`A^\top A` with their multiplicities: exact if A is small, else estimated."""
    if min(rows.n_rows, rows.n_columns) > _DENSE_SPECTRUM:
        return estimated_spectrum(rows, generator)
    return Dual(rows).spectrum() if rows.n_rows <= rows.n_columns else Primal(normal_matrix(rows)).spectrum()


def evidence(alpha: float, eigenvalues: Tensor, weights: Tensor, theta_squared: float) -> float:
    r"""Return the part of the Laplace log marginal likelihood that depends on :math:`\alpha`.

    .. math:: -\tfrac\alpha2 \|\theta\|^2 + \tfrac P2 \log\alpha - \tfrac12 \log\det(A^\top A + \alpha I)
              = -\tfrac\alpha2 \|\theta\|^2 - \tfrac12 \sum_i \log(1 + \lambda_i/\alpha).
    """
    return -0.5 * alpha * theta_squared - 0.5 * float((weights * torch.log1p(eigenvalues / alpha)).sum())


def best_evidence(eigenvalues: Tensor, weights: Tensor, theta_squared: float) -> float:
    r"""Return the precision that maximizes `evidence`.

    There :math:`\alpha \|\theta\|^2 = \sum_i \lambda_i / (\lambda_i + \alpha)`, which is at most the rank. The search
    therefore starts from the closed form, whatever precision is in use.
    """
    start = closed_form(int(weights[eigenvalues > 0].sum().ceil()), 0.0, theta_squared)
    return maximize(lambda alpha: evidence(alpha, eigenvalues, weights, theta_squared), start, "marginal likelihood")
