r"""The noise of a regression, from training residuals and the degrees of freedom that the network spent on them.

A network that has fitted its training data leaves residuals that are smaller than its errors on new data. The
linearized network says by how much. With the smoother :math:`H_\lambda = J J^\top (J J^\top + \lambda)^{-1}` of
ridge regression and R targets, a share :math:`q = 1 - \operatorname{tr} H_\lambda / R` of the degrees of freedom is
left, and generalized cross-validation (Craven and Wahba 1979) estimates the error on new data as the root mean square
residual over q. The ridge is that of MacKay's (1992) fixed point, :math:`\lambda = \sigma^2 \alpha` with
:math:`\sigma^2 = \mathrm{RSS} / (R q)` and :math:`\alpha = R (1 - q) / t`, where t is the squared length of the part of
the parameters that the rows see: what initialization left in their null space says nothing. Several outputs have a
noise each: their rows and residuals are divided by the root mean square residual of their output first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import UntrainedWarning, warn
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Regression
from nullbayes.limits import free_memory
from nullbayes.linalg.lanczos import gauss_rule
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import eigh
from nullbayes.posteriors.plan import RowSource
from nullbayes.posteriors.promise import NATS

_DENSE = 3_000  # size of the smaller side of the rows up to which all eigenvectors are computed
_PROBES, _STEPS = 4, 64  # of the quadrature for larger rows
_HELD = 0.25  # of the free memory, for rows that are multiplied many times
_LITTLE = 0.3  # share of degrees of freedom below which the residuals say little: docs/precision.md has the figures


@dataclass(frozen=True)
class Smoother:
    r"""What the fixed point needs of the rows.

    Attributes
    ----------
    nodes, weights : Tensor
        Eigenvalues of :math:`J J^\top`, all R of them, and the share of each.
    seen : callable
        The squared length of the part of the parameters that the rows see, where a ridge is in force.
    """

    nodes: Tensor
    weights: Tensor
    seen: Callable[[float], float]

    def left(self, ridge: float) -> float:
        """Return the share of the degrees of freedom that a ridge leaves."""
        return float((self.weights * ridge / (self.nodes + ridge)).sum())


def with_estimate(source: RowSource, rows: JacobianRows, *, tuned: bool = False) -> JacobianRows:
    """Return the rows of a regression, with an estimate of its noise where none was given.

    Warn of an estimate that is worth little, unless the noise is ``tuned`` afterwards.
    """
    fitted, given = rows.likelihood, source.likelihood
    if not isinstance(fitted, Regression) or not isinstance(given, Regression) or given.sigma_noise is not None:
        return rows
    rms = torch.tensor(fitted.sigma_noise, dtype=torch.float64, device="cpu").reshape(-1)
    spread = rms.new_tensor([rows.output_std]) if rows.output_stds is None else rows.output_stds.cpu()
    # each of several outputs is measured in units of its residuals, which then have a root mean square of one
    scale = torch.maximum(rms, 1e-6 * spread) if len(rms) > 1 else torch.ones_like(rms)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # which there was when the data were opened first
        left = share_left(*_whitened(rows, fitted, scale), float((rms / scale).square().mean().sqrt()))
        noise = torch.minimum(rms / left, torch.maximum(rms, spread))
        noisy = replace(fitted, sigma_noise=tuple(noise.tolist()))
        estimated = replace(source, likelihood=noisy).rows(rows.examples)
    if left < _LITTLE and not tuned:
        _warn(rows.examples.n_all, float((rms / noise).max()), float(noise.max()))
    return estimated


def _warn(n_data: int, ratio: float, noise: float) -> None:
    """Say what an estimate of the noise is worth that residuals tell little about, and what to do."""
    share = math.sqrt(2.0 * NATS)  # a variance v costs a target without a residual v/(2σ²) nats
    message = (
        f"The network fits its {n_data:,} training targets far better than it can predict new ones: their residuals "
        f"are {ratio:.2g} of the noise that is estimated for new data, {noise:.2g}. So little is left of "
        "the degrees of freedom that this estimate is often too small by a factor of two or more. Intervals may then "
        'be too narrow, and prior_precision="auto", which keeps the likelihood of these targets, holds the standard '
        f"deviation of outputs at about {share:.0%} of that noise on inputs like them. Pass held-out "
        "data, fit(loader, held_out=...) or posterior.tune(held_out); or "
        "likelihood=nb.likelihoods.Regression(sigma_noise=...) with the error that you expect on new data, which is "
        "larger than the noise of the measurements."
    )
    warn(message)


def _whitened(rows: JacobianRows, fitted: Regression, scale: Tensor) -> tuple[Smoother, int]:
    """Return what the fixed point needs of the rows of the outputs, each divided by a scale, and their number."""
    if len(scale) > 1:
        scaled = replace(fitted, sigma_noise=tuple(scale.tolist()))
        plain = OutputJacobian(rows.network, rows.examples, scaled, hessian=True)
    elif isinstance(rows, OutputJacobian) and not rows.hessian:
        plain = rows
    else:
        plain = OutputJacobian(rows.network, rows.examples, fitted)
    held = plain.costs().held_bytes <= _HELD * free_memory(plain.device)
    stored = plain.stored("device" if held else "recompute")
    return smoother(stored, plain.network.theta), stored.n_rows


def smoother(rows: Rows, theta: Tensor) -> Smoother:  # (P,)
    """Return the spectrum of the rows and their image of the parameters, exactly if a side is small, else estimated."""
    r, p = rows.n_rows, rows.n_columns
    if min(r, rows.n_all_columns) > _DENSE or (r > _DENSE and p < rows.n_all_columns):
        return _by_quadrature(rows, theta)
    if r <= p or p < rows.n_all_columns:
        values, vectors = eigh(rows.gram(torch.float64))
        values = values.clamp_min(0.0)
        alive = values > r * torch.finfo(torch.float64).eps * values[-1]
        image = vectors.T @ rows.mv(theta[None])[0].double()
        part = (image.square() / values.clamp_min(torch.finfo(torch.float64).tiny))[alive].sum()
        nodes = torch.where(alive, values, 0.0)
    else:
        values, vectors = eigh(normal_matrix(rows))
        values = values.clamp_min(0.0)
        alive = values > p * torch.finfo(torch.float64).eps * values[-1]
        part = (vectors.T @ theta.double())[alive].square().sum()
        nodes = torch.cat([torch.where(alive, values, 0.0), values.new_zeros(r - p)])
    return Smoother(nodes, torch.full_like(nodes, 1.0 / r), lambda _: float(part))


def _by_quadrature(rows: Rows, theta: Tensor) -> Smoother:
    def product(vector: Tensor) -> Tensor:
        return rows.mv(rows.rmv(vector[None]))[0]

    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_PROBES, rows.n_rows), generator=generator, device="cpu").to(rows.device, rows.dtype)
    rules = [gauss_rule(product, 2.0 * start - 1.0, _STEPS) for start in signs]
    nodes, weights = (torch.cat(parts) for parts in zip(*rules, strict=True))
    image = rows.mv(theta[None])[0]
    length = float(image.double().square().sum())
    if length == 0.0:
        return Smoother(nodes, weights / _PROBES, lambda _: 0.0)
    own, shares = gauss_rule(product, image, _STEPS)
    return Smoother(nodes, weights / _PROBES, lambda ridge: length * float((shares / (own + ridge)).sum()))


def share_left(found: Smoother, n_targets: int, rms: float) -> float:
    """Return the share of the degrees of freedom that is left at the fixed point of noise and precision.

    Both sides of the equation are monotone in the ridge, so that bisection finds its only root.
    """
    largest = float(found.nodes.max())
    if rms <= 0.0 or largest <= 0.0 or found.seen(largest) <= 0.0:
        return 1.0
    low, high = math.log(largest) - 120.0, math.log(largest) + 40.0
    for _ in range(60):
        ridge = math.exp(0.5 * (low + high))
        left = found.left(ridge)
        if ridge * found.seen(ridge) * left < n_targets * rms**2 * (1.0 - left):
            low = math.log(ridge)
        else:
            high = math.log(ridge)
    return found.left(math.exp(high))
