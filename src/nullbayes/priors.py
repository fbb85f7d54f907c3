r"""The prior precision :math:`\alpha`: its closed form, and its choice by marginal or held-out likelihood.

A sample is :math:`\theta + v/\sqrt\alpha`, and the direction :math:`v` does not depend on :math:`\alpha`, so that a new
precision needs no new projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nullbayes.errors import SettingsError, warn
from nullbayes.linalg.curvature import Dual, Primal, estimated_spectrum
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Rows

_DENSE_SPECTRUM = 3_000  # largest min(R, P) for which all eigenvalues are computed
_DECADES = 8.0  # range of the search on either side of the start


def closed_form(n_parameters: int, kernel_dimension: float, theta_squared: float) -> float:
    r"""Return :math:`\alpha^* = (P - \operatorname{tr}(I - A^+A)) / \|\theta\|^2`, the rank over the squared norm.

    It is the stationary point of :math:`-\tfrac\alpha2\|\theta\|^2 + \tfrac{\text{rank}}2 \log\alpha`. Lemma 3.4 of
    the paper prints its reciprocal; see ``docs/errata.md``.
    """
    rank = n_parameters - kernel_dimension
    if rank <= 0 or theta_squared <= 0:
        reason = "the rows have rank zero" if rank <= 0 else "all parameters are zero"
        msg = f"There is no optimal prior precision, because {reason}: pass prior_precision=<a number>."
        if rank <= 0:
            msg = (
                f"There is no optimal prior precision, because {reason}, so that the training data hold nothing. The "
                "losses of a network that fits its data exactly have no gradient: use ProjectedPosterior, which holds "
                "the outputs."
            )
        raise SettingsError(msg)
    return rank / theta_squared


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
    low, high = grid[best - 1], grid[best + 1]
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-3:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if objective(math.exp(left)) < objective(math.exp(right)):
            low = left
        else:
            high = right
    return math.exp(0.5 * (low + high))


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
