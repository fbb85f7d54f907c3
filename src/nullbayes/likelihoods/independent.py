"""Likelihoods of independent outputs: binary labels, and numbers with Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods.base import Likelihood, alike, shrunk, softplus

_EXACT = 1e-9  # an output with smaller residuals, relative to its targets, gets the relative noise of the others


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent logits, each with a target 0 or 1.

    Parameters
    ----------
    name : str
        "binary" for one logit per example, "multilabel" for several.
    temperature : float
        Predicted probabilities are the sigmoid of the logits divided by it.

    Examples
    --------
    >>> import torch
    >>> Bernoulli("binary").loss(torch.zeros(2, 1), torch.tensor([0, 1]))
    tensor([0.6931, 0.6931])
    """

    name: str
    temperature: float = 1.0
    independent_outputs = True

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse the wrong number of logits, and targets that are not 0 or 1."""
        if self.name == "binary" and outputs.ndim == 2 and outputs.shape[1] != 1:
            msg = (
                f'"binary" takes one logit per example, but the network has {outputs.shape[1]} outputs: '
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
        """Return the sum of the binary cross entropies of each example, accurate for confident ones too."""
        signs = 1.0 - 2.0 * targets.reshape(outputs.shape).to(outputs.dtype)
        return softplus(signs * outputs).flatten(1).sum(1)

    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the negative log probability of each label."""
        logits = self._logits(outputs.double(), None if variance is None else variance.double())
        return softplus((1.0 - 2.0 * targets.reshape(outputs.shape).double()) * logits)

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood with logits divided by the temperature."""
        return replace(self, temperature=temperature)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Multiply by sqrt(p (1 − p))."""
        p = outputs.sigmoid()
        return values * (p * (1 - p)).sqrt()

    def probabilities(self, outputs: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the sigmoid; a variance shrinks the logits."""
        return self._logits(outputs, variance).sigmoid()

    def _logits(self, outputs: Tensor, variance: Tensor | None) -> Tensor:
        logits = outputs / self.temperature
        return logits if variance is None else shrunk(logits, variance / self.temperature**2)

    def choices(self, outputs: Tensor) -> Tensor:  # (n, ...) -> (n, ..., 2)
        """Return two logits per label.

        A binary output decides between two classes, which are treated alike. Of several labels, those that apply are
        evidence of a familiar input and those that do not apply are not, so that the others have the logit zero.
        """
        both = (-outputs / 2, outputs / 2) if self.name == "binary" else (torch.zeros_like(outputs), outputs)
        return torch.stack(both, dim=-1)

    def choice_probabilities(self, probs: Tensor) -> Tensor:  # (n, ...) -> (n, ..., 2)
        """Return the probabilities that each label does not apply, and that it does.

        Both are at least what 1 − p can be told from zero, so that the two sides are treated alike.
        """
        return torch.stack((1 - probs, probs), dim=-1).clamp_min(torch.finfo(probs.dtype).eps / 2)

    def entropy_terms(self, probs: Tensor) -> Tensor:
        """Return the entropy of each label."""
        terms: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
        return terms

    def accuracy(self, probs: Tensor, targets: Tensor) -> float:
        """Return the share of correct labels."""
        return float(((probs >= 0.5) == targets.reshape(probs.shape).bool()).double().mean())


@dataclass(frozen=True)
class Regression(Likelihood):
    r"""Gaussian noise around each output.

    Parameters
    ----------
    sigma_noise : float or sequence of float, optional
        Standard deviation of the noise, one number or one per entry of the last dimension of the outputs. By default it
        is the root mean square of the training residuals, separately for each output of (n, O); the projected
        posteriors correct it for the degrees of freedom of the network. ``Prediction.noise`` is its square.
    name : str
        Not to be changed: files store it.
    temperature : float
        Set by `tempered`: the factor by which the noise variance was multiplied.

    Examples
    --------
    >>> import torch
    >>> Regression(sigma_noise=2.0).loss(torch.zeros(1, 2), torch.tensor([[2.0, 4.0]]))
    tensor([2.5000])
    """

    sigma_noise: float | tuple[float, ...] | None = None
    name: str = "regression"
    temperature: float = 1.0
    has_probabilities = False
    independent_outputs = True

    def __post_init__(self) -> None:
        given = self.sigma_noise
        if given is None:
            return
        numbers = [float(value) for value in torch.as_tensor(given, dtype=torch.float64, device="cpu").flatten()]
        if not numbers or not all(0 < value < math.inf for value in numbers):
            msg = f"sigma_noise must be positive, not {given}."
            raise LikelihoodError(msg)
        object.__setattr__(self, "sigma_noise", numbers[0] if len(numbers) == 1 else tuple(numbers))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse integer targets, shapes that would be broadcast, and noise for another number of outputs."""
        if not targets.is_floating_point():
            one = outputs.ndim == 1 or outputs.shape[1] == 1
            labels = not one or bool(((targets == 0) | (targets == 1)).all())
            other = f'use likelihood="{"binary" if one else "classification"}", or ' if labels else ""
            msg = f'Targets are integers: {other}convert them with targets.float() for "regression".'
            raise LikelihoodError(msg)
        if not alike(tuple(outputs.shape), tuple(targets.shape)):
            msg = (
                f"Regression targets of shape {tuple(targets.shape)} "
                f"do not fit outputs of shape {tuple(outputs.shape)}."
            )
            raise LikelihoodError(msg)
        if isinstance(self.sigma_noise, tuple) and len(self.sigma_noise) != outputs.shape[-1]:
            msg = (
                f"sigma_noise has {len(self.sigma_noise)} numbers, but outputs of shape {tuple(outputs.shape)} need "
                f"{outputs.shape[-1]}, or one for all."
            )
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return half the squared residual over the variance, summed over the outputs."""
        residual = (outputs - targets.reshape(outputs.shape).to(outputs.dtype)) / self._sigma(outputs)
        return 0.5 * residual.square().flatten(1).sum(1)

    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the negative log density of a Gaussian whose variance is that of the noise plus that of the output."""
        residual = outputs.double() - targets.reshape(outputs.shape).double()
        total = torch.zeros_like(residual) + self._sigma(residual) ** 2
        if variance is not None:
            total += variance
        return 0.5 * (residual.square() / total + (2.0 * math.pi * total).log())

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood with the noise variance multiplied by the temperature."""
        factor = math.sqrt(temperature / self.temperature)
        sigma = self.sigma_noise or 1.0
        scaled = tuple(factor * value for value in sigma) if isinstance(sigma, tuple) else factor * sigma
        return replace(self, sigma_noise=scaled, temperature=temperature)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Divide by the standard deviation."""
        return values / self._sigma(values)

    def noise_variance(self, outputs: Tensor) -> Tensor:
        """Return the variance of the noise, one number or one per output."""
        return self._sigma(outputs) ** 2

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (2, ...)
        """Return the mean squared residual of each output, and the mean square of its targets."""
        wanted = targets.reshape(outputs.shape).double()
        return torch.stack([(outputs.double() - wanted).square().mean(0), wanted.square().mean(0)])

    def fitted(self, outputs: Tensor, targets: Tensor, statistics: Tensor | None = None) -> Likelihood:
        """Return the likelihood with the standard deviation of the residuals, one per output."""
        if self.sigma_noise is not None:
            return self
        squares = self.statistics(outputs, targets) if statistics is None else statistics
        found, size = (squares if outputs.ndim == 2 else squares.flatten(1).mean(1)[:, None]).sqrt()
        exact = found <= _EXACT * size  # outputs may have different units, so each is compared with its own targets
        if bool(exact.any()) and not bool(exact.all()):
            relative = (found / size)[~exact & (size > 0)].square().mean().sqrt().nan_to_num()
            overall = torch.where(size > 0, relative * size, found.square().mean().sqrt())
            found = torch.where(exact, overall, found)
        return replace(self, sigma_noise=tuple(found.clamp_min(1e-12).flatten().tolist()))

    def _sigma(self, like: Tensor) -> Tensor:
        return torch.tensor(self.sigma_noise or 1.0, dtype=like.dtype, device=like.device)
