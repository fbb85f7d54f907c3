r"""What every likelihood answers: a loss for each example, its curvature in output space, predictive probabilities.

Predictions average over parameter samples. The average over a Gaussian output with mean :math:`f` and variance
:math:`v` has a closed form, exact for regression and a very good approximation for logits (MacKay 1992):

.. math:: \int \sigma(z)\, N(z; f, v)\, dz \approx \sigma\bigl(f / \sqrt{1 + \pi v / 8}\bigr).

It has no Monte Carlo noise, and it never changes the sign of a logit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError

LossFn = Callable[[Tensor, Tensor], Tensor]  # outputs (n, ...), targets -> losses (n,)


class Likelihood(ABC):
    """What the outputs say about the targets."""

    name: str
    has_probabilities: bool = True
    has_closed_form: bool = True  # of the predictive density, from a mean and a variance
    temperature: float = 1.0
    some_ignored: bool = False  # whether training targets left positions out
    more_ignored: bool = False  # and such as the inputs' own mask counts

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs (n, ...) and targets that do not fit."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, ...) -> (n,)
        """Return minus the log-likelihood of each example up to :meth:`constant`, summed over positions."""

    @abstractmethod
    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, ...) -> (n, ...)
        r"""Multiply values, which have the shape of the outputs, by a root of the loss's Hessian in the outputs.

        That is by :math:`L`, with :math:`L^\top L` the Hessian of the loss of each example.
        """

    def nll(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:  # (n, ...) -> (n,)
        """Return minus the log predictive density of each example, summed over its targets, in float64.

        Parameters
        ----------
        outputs : Tensor (n, ...)
            Outputs of the network, which are the mean of the linearized samples.
        targets : Tensor
            As for ``loss``.
        variance : Tensor (n, ...), optional
            What :meth:`link_variance` returns; None for the network itself.
        """
        return self.nll_terms(outputs, targets, variance).flatten(1).sum(1)

    @abstractmethod
    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:  # (n, ...)
        """Return the terms of :meth:`nll`: (n, O) for outputs that are independent, else of each example (n, 1)."""

    def n_targets(self, outputs: Tensor, targets: Tensor) -> int:
        """Return how many targets the examples have: one for each label or number that counts."""
        return outputs.numel()

    def link_variance(self, outputs: Tensor, changes: Tensor) -> Tensor:  # (n, ...), (S, n, ...) -> (n, ...)
        """Return the variance that the closed form of the predictive takes, from centred changes of the outputs."""
        return changes.square().sum(0) / (len(changes) - 1)

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood at another temperature: logits divided by it, or a noise variance times it."""
        msg = f"A {self.name} likelihood has no temperature: it stays at 1."
        raise LikelihoodError(msg)

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | None:  # (n, ...) -> bool (n, ...)
        """Return which outputs the targets speak of; None for all of them."""
        return None

    def positions(self, outputs: Tensor) -> tuple[int, ...]:
        """Return the shape of the positions of some outputs, examples first: (n,) where there is one answer each."""
        return tuple(outputs.shape[:1] if outputs.ndim == 2 else outputs.shape)

    def at_positions(self, values: Tensor, *, largest: bool) -> Tensor:  # (n, ...)
        """Return the largest of the values of outputs at each position, or their sum."""
        if values.ndim > 2:
            return values  # each output is a position
        return values.amax(1) if largest else values.sum(1)

    def noise_variance(self, outputs: Tensor) -> Tensor | None:
        """Return the variance of the noise of such outputs, to be added to theirs; None where there is none."""
        return None

    def spread(self, outputs: Tensor, targets: Tensor) -> float:  # (n, ...)
        """Return the root mean square standard deviation over examples of the outputs that the targets speak of."""
        values, counted = outputs.double(), self.counted(outputs, targets)
        if counted is None:
            return float(values.var(0, unbiased=False).mean().sqrt())
        weights = counted.double()
        mean = (values * weights).sum(0) / weights.sum(0).clamp_min(1.0)
        return float((((values - mean).square() * weights).sum() / weights.sum()).sqrt())

    def settings(self) -> dict[str, Any]:
        """Return what a file must hold of it, beside its name."""
        return {}

    def accuracy(self, probs: Tensor, targets: Tensor) -> float | None:
        """Return the share of right answers; None where there are no classes."""
        return None

    def probabilities(self, outputs: Tensor, variance: Tensor | None = None) -> Tensor:  # (..., O) -> (..., O)
        """Turn outputs into probabilities at the temperature, averaged in closed form where a variance is given.

        ``variance`` is what :meth:`link_variance` returns. The predicted class stays that of the outputs.
        """
        msg = f"A {self.name} likelihood has no class probabilities."
        raise LikelihoodError(msg)

    def entropy_terms(self, probs: Tensor) -> Tensor:  # (..., O) -> (..., O)
        """Return what each probability adds to the entropy."""
        terms: Tensor = torch.special.entr(probs)
        return terms

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return means over these examples, in float64; averaged over batches, they are what :meth:`fitted` needs."""
        return torch.zeros(0, dtype=torch.float64, device=outputs.device)

    def fitted(self, outputs: Tensor, targets: Tensor, statistics: Tensor | None = None) -> Likelihood:
        """Return the likelihood with whatever it takes from the training data filled in.

        With :meth:`statistics` of all training data, some of the outputs and targets are enough.
        """
        return self


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) to rounding for every x; torch's own turns linear at 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def alike(wanted: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether two shapes are the same but for dimensions of one entry after the first."""
    return wanted[:1] == given[:1] and [d for d in wanted[1:] if d != 1] == [d for d in given[1:] if d != 1]


def shrunk(logits: Tensor, variance: Tensor) -> Tensor:
    """Divide logits by sqrt(1 + π v / 8), so that their sigmoid is about its average over the variance."""
    return logits / (1.0 + (math.pi / 8.0) * variance).sqrt()
