"""Outputs that are independent of each other: coins, and numbers with Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods.base import Likelihood, alike, shrunk, softplus


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent logits, each with a target 0 or 1: "binary" has one, "multilabel" several.

    Predicted probabilities are those of the logits divided by ``temperature``.
    """

    name: str
    temperature: float = 1.0

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse the wrong number of logits, and targets that are not 0 or 1."""
        if self.name == "binary" and outputs.ndim == 2 and outputs.shape[1] != 1:
            msg = (
                f'"binary" takes one logit an example, but the network has {outputs.shape[1]} outputs: '
                'use "classification" or "multilabel".'
            )
            raise LikelihoodError(msg)
        if not alike(tuple(outputs.shape), tuple(targets.shape)):
            msg = (
                f"{self.name} targets must be one 0 or 1 for each logit, outputs of shape {tuple(outputs.shape)}, "
                f"not shape {tuple(targets.shape)}."
            )
            raise LikelihoodError(msg)
        if not bool(((targets == 0) | (targets == 1)).all()):
            msg = f"{self.name} targets must be 0 or 1; found {float(targets.min()):g} to {float(targets.max()):g}."
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the binary cross entropies of each example, exact to rounding for confident ones too."""
        signs = 1.0 - 2.0 * targets.reshape(outputs.shape).to(outputs.dtype)
        return softplus(signs * outputs).flatten(1).sum(1)

    def nll(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return minus the log probability of each example's labels."""
        return self.loss(self._logits(outputs.double(), None if variance is None else variance.double()), targets)

    def settings(self) -> dict[str, float | int | None]:
        """Return the temperature."""
        return {"temperature": self.temperature}

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood with logits divided by the temperature."""
        return replace(self, temperature=temperature)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Multiply by sqrt(p (1 − p))."""
        p = outputs.sigmoid()
        return values * (p * (1 - p)).sqrt()

    def probabilities(self, outputs: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the sigmoid, of logits that a variance shrinks."""
        return self._logits(outputs, variance).sigmoid()

    def _logits(self, outputs: Tensor, variance: Tensor | None) -> Tensor:
        logits = outputs / self.temperature
        return logits if variance is None else shrunk(logits, variance / self.temperature**2)

    def entropy_terms(self, probs: Tensor) -> Tensor:
        """Return the entropies of the two-sided coins."""
        terms: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
        return terms

    def accuracy(self, probs: Tensor, targets: Tensor) -> float:
        """Return the share of right labels."""
        return float(((probs >= 0.5) == targets.reshape(probs.shape).bool()).double().mean())


@dataclass(frozen=True)
class Regression(Likelihood):
    r"""Gaussian with one standard deviation for all outputs, given or fitted.

    Parameters
    ----------
    sigma_noise : float, optional
        The standard deviation. By default it is the root mean square of the training residuals at the trained network;
        the projected posteriors correct it for the degrees of freedom that the network spent on them.
    """

    sigma_noise: float | None = None
    name: str = "regression"
    temperature: float = 1.0
    has_probabilities = False

    def __post_init__(self) -> None:
        if self.sigma_noise is not None and not 0 < self.sigma_noise < float("inf"):
            msg = f"sigma_noise must be positive, not {self.sigma_noise}."
            raise LikelihoodError(msg)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse class labels and shapes that would broadcast."""
        if not targets.is_floating_point():
            msg = (
                'Targets are integers: use likelihood="classification", '
                'or convert them with targets.float() for "regression".'
            )
            raise LikelihoodError(msg)
        if not alike(tuple(outputs.shape), tuple(targets.shape)):
            msg = (
                f"Regression targets of shape {tuple(targets.shape)} "
                f"do not fit outputs of shape {tuple(outputs.shape)}."
            )
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return half the squared residual over the variance, summed over the outputs."""
        residual = (outputs - targets.reshape(outputs.shape).to(outputs.dtype)) / (self.sigma_noise or 1.0)
        return 0.5 * residual.square().flatten(1).sum(1)

    def nll(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return minus the log density of a Gaussian with the variance of the noise and, where given, of the output."""
        residual = outputs.double() - targets.reshape(outputs.shape).double()
        total = torch.full_like(residual, (self.sigma_noise or 1.0) ** 2)
        if variance is not None:
            total += variance
        return 0.5 * (residual.square() / total + (2.0 * math.pi * total).log()).flatten(1).sum(1)

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood with a noise variance times the temperature."""
        sigma = (self.sigma_noise or 1.0) * math.sqrt(temperature / self.temperature)
        return replace(self, sigma_noise=sigma, temperature=temperature)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Divide by the standard deviation."""
        return values / (self.sigma_noise or 1.0)

    def settings(self) -> dict[str, float | int | None]:
        """Return the standard deviation, and the temperature that is in it."""
        return {"sigma_noise": self.sigma_noise, "temperature": self.temperature}

    def fitted(self, outputs: Tensor, targets: Tensor) -> Likelihood:
        """Return the likelihood with the standard deviation of the residuals."""
        if self.sigma_noise is not None:
            return self
        residual = outputs.double() - targets.reshape(outputs.shape).double()
        return Regression(max(float(residual.square().mean().sqrt()), 1e-12))
