"""Metrics of predicted numbers: point predictions, Gaussian predictives, intervals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nullbayes.metrics.inputs import Array, as_numbers, same_entries


def rmse(mean: Array, targets: Array) -> float:
    r"""Root mean square error, :math:`\sqrt{\frac1M \sum_i (y_i - \mu_i)^2}`, over all :math:`M` entries.

    Parameters
    ----------
    mean, targets : array_like
        Predictions and targets of the same shape, such as (N,) or (N, O).

    Returns
    -------
    float
        The error, in the unit of the targets.

    Examples
    --------
    >>> rmse(mean=[1.0, 2.0], targets=[1.0, 4.0])
    1.4142136
    """
    mu, y = _entries(mean=mean, targets=targets)
    return float((y - mu).square().mean().sqrt())


def gaussian_nll(mean: Array, variance: Array, targets: Array) -> float:
    r"""Negative log-likelihood of targets under Gaussian predictives, in nats per target.

    .. math:: \frac1M \sum_i \tfrac12 \Big(\log (2 \pi \sigma_i^2) + \frac{(y_i - \mu_i)^2}{\sigma_i^2}\Big)

    The constant :math:`\log 2 \pi` is included, which `torch.nn.functional.gaussian_nll_loss` leaves out by default.

    Parameters
    ----------
    mean, targets : array_like
        Means and targets of the same shape, such as (N,) or (N, O). Covariances between outputs are not used.
    variance : array_like
        Variances of the targets, positive, of the same shape, or one number for all. They must include the variance of
        the noise.

    Returns
    -------
    float
        The mean over targets; lower is better. It depends on the unit of the targets and may be negative.

    Examples
    --------
    >>> gaussian_nll(mean=[0.0, 0.0], variance=1.0, targets=[0.0, 1.0])
    1.1689385
    """
    mu, var, y = _gaussians(mean, variance, targets)
    return float(((2 * math.pi * var).log() + (y - mu).square() / var).mean() / 2)


def crps(mean: Array, variance: Array, targets: Array) -> float:
    r"""Continuous ranked probability score of Gaussian predictives.

    The score of one target :math:`y` is :math:`\int (F(t) - [t \ge y])^2 \, dt`, with the distribution function
    :math:`F` of the predictive. For a Gaussian, with :math:`z = (y - \mu) / \sigma`, it is

    .. math:: \sigma \Big(z \, (2 \Phi(z) - 1) + 2 \varphi(z) - \tfrac1{\sqrt \pi}\Big).

    As the variance goes to zero it tends to the absolute error. A target far from the mean costs its distance, not its
    squared distance as in `gaussian_nll`.

    Parameters
    ----------
    mean, targets : array_like
        Means and targets of the same shape, such as (N,) or (N, O).
    variance : array_like
        Variances of the targets, positive, of the same shape, or one number for all.

    Returns
    -------
    float
        The mean over targets, in their unit; lower is better.

    Examples
    --------
    >>> crps(mean=[0.0], variance=[1.0], targets=[0.0])
    0.2336950
    """
    mu, var, y = _gaussians(mean, variance, targets)
    sigma = var.sqrt()
    z = (y - mu) / sigma
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return float((sigma * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def interval_coverage(lower: Array, upper: Array, targets: Array) -> float:
    """Share of targets inside their interval, including its ends.

    It should be close to the nominal level of the intervals. Compare `interval_width` between methods that have the
    same coverage.

    Parameters
    ----------
    lower, upper, targets : array_like
        Ends of the intervals and targets, of the same shape, such as (N,) or (N, O).

    Returns
    -------
    float
        The share, between 0 and 1.

    Examples
    --------
    >>> interval_coverage(lower=[0.0, 0.0], upper=[1.0, 1.0], targets=[1.0, 3.0])
    0.5
    """
    low, high, y = _entries(lower=lower, upper=upper, targets=targets)
    _check_order(low, high)
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(lower: Array, upper: Array) -> float:
    """Mean width of intervals, in the unit of the targets.

    Parameters
    ----------
    lower, upper : array_like
        Ends of the intervals, of the same shape, such as (N,) or (N, O).

    Returns
    -------
    float
        The mean width.

    Examples
    --------
    >>> interval_width(lower=[0.0, 0.0], upper=[1.0, 2.0])
    1.5
    """
    low, high = _entries(lower=lower, upper=upper)
    _check_order(low, high)
    return float((high - low).mean())


def _gaussians(mean: Array, variance: Array, targets: Array) -> tuple[Tensor, Tensor, Tensor]:
    mu, y = _entries(mean=mean, targets=targets)
    var = as_numbers(variance, "variance")
    if var.ndim:
        mu, var, y = _entries(mean=mean, variance=variance, targets=targets)
    if float(var.min()) <= 0:
        message = (
            f"variance must be positive, but its smallest entry is {float(var.min()):.5g}; "
            "add the variance of the noise to the variance of the mean."
        )
        raise ValueError(message)
    return mu, var, y


def _entries(**values: Array) -> list[Tensor]:
    """Return finite numbers, flattened; refuse shapes that would be broadcast."""
    numbers = {name: as_numbers(value, name) for name, value in values.items()}
    shapes = {name: tuple(number.shape) for name, number in numbers.items()}
    first, wanted = next(iter(shapes.items()))
    for name, shape in shapes.items():
        if not shape:
            message = f"{name} is a single number; pass one value for each example, of shape (N,) or (N, O)."
            raise ValueError(message)
        if not same_entries(wanted, shape):
            message = (
                f"{name} must have the shape of {first}, {wanted}, but it has shape {shape}; "
                "reshape it so that each entry meets its own."
            )
            raise ValueError(message)
    return [number.flatten() for number in numbers.values()]


def _check_order(low: Tensor, high: Tensor) -> None:
    wrong = int((low > high).sum())
    if wrong:
        message = f"lower is above upper in {wrong} of {len(low)} intervals; check the order of the arguments."
        raise ValueError(message)
