r"""The interface of likelihoods, and the likelihood of a user's own loss.

Predictions average over parameter samples. The average over a Gaussian output with mean :math:`f` and variance
:math:`v` has a closed form, which is exact for regression and a good approximation for logits (MacKay 1992):

.. math:: \int \sigma(z)\, N(z; f, v)\, dz \approx \sigma\bigl(f / \sqrt{1 + \pi v / 8}\bigr).

It has no Monte Carlo error, and it never changes the sign of a logit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError

LossFn = Callable[[Tensor, Tensor], Tensor]  # outputs (n, ...), targets -> losses (n,)


class Likelihood(ABC):
    """The distribution of the targets given the outputs of the network: the interface that posteriors use.

    Built-in likelihoods are `Classification`, `Bernoulli`, `Regression` and `CustomLoss`. Outputs are tensors of shape
    (n, ...), in the shape in which the network returns them.

    Examples
    --------
    >>> import torch
    >>> from nullbayes.likelihoods import Classification
    >>> Classification().loss(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    tensor([1.3863, 1.3863, 1.3863])
    """

    name: str
    has_probabilities: bool = True
    has_closed_form: bool = True  # whether `nll` takes a variance
    independent_outputs: bool = False  # whether every output has a target, and perhaps units, of its own
    temperature: float = 1.0
    some_ignored: bool = False  # whether training targets ignored some positions
    more_ignored: bool = False  # whether some of these are not masked by the inputs' own attention mask

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs (n, ...) and targets that do not fit."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, ...) -> (n,)
        """Return the negative log-likelihood of each example, up to a constant, summed over positions."""

    @abstractmethod
    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, ...) -> (n, ...)
        r"""Multiply values by :math:`L`, where :math:`L^\top L` is the Hessian of an example's loss in its outputs."""

    def nll(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:  # (n, ...) -> (n,)
        """Return the negative log predictive density of each example, summed over its targets, in float64.

        ``outputs`` are those of the network, which are the mean of the linearized samples. ``variance`` is the result
        of `link_variance`, or None for the network itself.
        """
        return self.nll_terms(outputs, targets, variance).flatten(1).sum(1)

    @abstractmethod
    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:  # (n, ...)
        """Return the terms of `nll`: (n, ...) for independent outputs, (n, 1) otherwise."""

    def n_targets(self, outputs: Tensor, targets: Tensor) -> int:
        """Return the number of targets that count: labels or numbers, not examples."""
        return outputs.numel()

    def link_variance(self, outputs: Tensor, changes: Tensor) -> Tensor:  # (n, ...), (S, n, ...) -> (n, ...)
        """Return the variance that the closed form needs, from centred changes of the outputs."""
        return changes.square().sum(0) / (len(changes) - 1)

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood at another temperature, which divides logits or multiplies the noise variance."""
        msg = f"A {self.name} likelihood has no temperature: it stays at 1."
        raise LikelihoodError(msg)

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | None:  # (n, ...) -> bool (n, ...)
        """Return which outputs have a target that counts; None if all do."""
        return None

    def positions(self, outputs: Tensor) -> tuple[int, ...]:
        """Return the shape (n, ...) of the positions of outputs: (n,) if there is one prediction per example."""
        return tuple(outputs.shape[:1] if outputs.ndim == 2 else outputs.shape)

    def at_positions(self, values: Tensor, *, largest: bool) -> Tensor:  # (n, ...)
        """Return the largest value or the sum of the values at each position."""
        if values.ndim > 2:  # each output is a position
            return values
        return values.amax(1) if largest else values.sum(1)

    def choices(self, outputs: Tensor) -> Tensor:  # (n, ...) -> (n, ..., C)
        """Return the logits of the alternatives of each decision, in the last dimension."""
        msg = f"A {self.name} likelihood has no logits."
        raise LikelihoodError(msg)

    def choice_probabilities(self, probs: Tensor) -> Tensor:  # (n, ...) -> (n, ..., C)
        """Return the probabilities of the alternatives of each decision, in the last dimension."""
        msg = f"A {self.name} likelihood has no class probabilities."
        raise LikelihoodError(msg)

    def over_choices(self, values: Tensor) -> Tensor:  # one per decision -> one per position (n, ...)
        """Return the sum over the decisions at each position."""
        return self.at_positions(values, largest=False)

    def noise_variance(self, outputs: Tensor) -> Tensor | None:
        """Return the variance of the observation noise; None if the likelihood has none."""
        return None

    def spread(self, outputs: Tensor, targets: Tensor) -> float:  # (n, ...)
        """Return the root mean square, over outputs that count, of their standard deviation over examples."""
        values, counted = outputs.double(), self.counted(outputs, targets)
        if counted is None:
            return float(values.var(0, unbiased=False).mean().sqrt())
        weights = counted.double()
        mean = (values * weights).sum(0) / weights.sum(0).clamp_min(1.0)
        return float((((values - mean).square() * weights).sum() / weights.sum()).sqrt())

    def settings(self) -> dict[str, Any]:
        """Return the settings that are saved in files, besides the name: the other fields of a dataclass."""
        if not is_dataclass(self):
            return {}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    def accuracy(self, probs: Tensor, targets: Tensor) -> float | None:
        """Return the share of correct predictions; None if there are no classes."""
        return None

    def probabilities(self, outputs: Tensor, variance: Tensor | None = None) -> Tensor:  # (..., O) -> (..., O)
        """Return probabilities at the temperature; with a variance, their average in closed form.

        ``variance`` is the result of `link_variance`. It does not change the predicted class.
        """
        msg = f"A {self.name} likelihood has no class probabilities."
        raise LikelihoodError(msg)

    def entropy_terms(self, probs: Tensor) -> Tensor:  # (..., O) -> (..., O)
        """Return the contribution of each probability to the entropy."""
        terms: Tensor = torch.special.entr(probs)
        return terms

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return means over these examples in float64, which `fitted` needs; they can be averaged over batches."""
        return torch.zeros(0, dtype=torch.float64, device=outputs.device)

    def fitted(self, outputs: Tensor, targets: Tensor, statistics: Tensor | None = None) -> Likelihood:
        """Return the likelihood with the settings that are estimated from the training data.

        With the `statistics` of all training data, some of the outputs and targets are enough.
        """
        return self


@dataclass(frozen=True)
class CustomLoss(Likelihood):
    """The likelihood of a user's own loss.

    Parameters
    ----------
    function : callable
        Takes outputs (n, ...) and targets, and returns one loss (n,) per example, without reduction. It must be
        differentiable.
    name : str
        Not to be changed: files store it.

    Examples
    --------
    >>> import torch, nullbayes as nb
    >>> absolute = nb.likelihoods.CustomLoss(lambda outputs, targets: (outputs - targets).abs().sum(1))
    >>> absolute.loss(torch.zeros(2, 3), torch.ones(2, 3))
    tensor([3., 3.])
    """

    function: LossFn
    name: str = "custom"
    has_probabilities = has_closed_form = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a loss that is reduced or not finite."""
        losses = self.function(outputs, targets)
        if not isinstance(losses, Tensor) or losses.shape != (len(outputs),):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            msg = (
                f"The loss must return one value per example, shape ({len(outputs)},), not {shape}: "
                'use reduction="none".'
            )
            if isinstance(losses, Tensor) and losses.shape[:1] == outputs.shape[:1]:
                msg = (
                    f"The loss must return one value per example, shape ({len(outputs)},), not {shape}: sum over the "
                    "other dimensions, likelihood=lambda outputs, targets: loss(outputs, targets).flatten(1).sum(1)."
                )
            if shape == (len(outputs), len(outputs)) and outputs.shape[1:] == (1,):
                msg = (
                    f"The loss compares every output with every target, {shape}: outputs have the shape "
                    f"{tuple(outputs.shape)} here, so take outputs[:, 0] in it."
                )
            raise LikelihoodError(msg)
        if not torch.isfinite(losses).all():
            msg = "The loss is NaN or Inf on the training data."
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example."""
        return self.function(outputs, targets)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Refuse, because the Hessian of the loss is not known."""
        msg = "hessian=True needs a built-in likelihood; with a loss of your own use LossJacobian, or hessian=False."
        raise LikelihoodError(msg)

    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the loss of each example, taken as a negative log-likelihood."""
        if variance is not None:
            msg = "There is no closed form of the predictive density for a loss of your own."
            raise LikelihoodError(msg)
        return self.loss(outputs, targets).double()[:, None]

    def settings(self) -> dict[str, Any]:
        """Return nothing, because files do not hold functions."""
        return {}

    def n_targets(self, outputs: Tensor, targets: Tensor) -> int:
        """Return the number of examples, because the loss does not tell how many targets it has."""
        return len(outputs)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) to rounding error for every x; torch's own becomes linear at 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def alike(wanted: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Return whether two shapes agree up to dimensions of size one after the first."""
    return wanted[:1] == given[:1] and [d for d in wanted[1:] if d != 1] == [d for d in given[1:] if d != 1]


def shrunk(logits: Tensor, variance: Tensor) -> Tensor:
    """Divide logits by sqrt(1 + π v / 8): their sigmoid is then its approximate average over the variance."""
    return logits / (1.0 + (math.pi / 8.0) * variance).sqrt()
