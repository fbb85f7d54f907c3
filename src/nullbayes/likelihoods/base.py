"""What every likelihood answers: a loss for each example, its curvature in output space, probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError

LossFn = Callable[[Tensor, Tensor], Tensor]  # outputs (n, ...), targets -> losses (n,)


class Likelihood(ABC):
    """What the outputs say about the targets."""

    name: str
    has_probabilities: bool = True

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

    def constant(self, n_outputs: int) -> float:
        """Return what the loss of an example with so many outputs lacks of minus the log-likelihood."""
        return 0.0

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | None:  # (n, ...) -> bool (n, ...)
        """Return which outputs the targets speak of; None for all of them."""
        return None

    def spread(self, outputs: Tensor, targets: Tensor) -> float:  # (n, ...)
        """Return the root mean square standard deviation over examples of the outputs that the targets speak of."""
        values, counted = outputs.double(), self.counted(outputs, targets)
        if counted is None:
            return float(values.var(0, unbiased=False).mean().sqrt())
        weights = counted.double()
        mean = (values * weights).sum(0) / weights.sum(0).clamp_min(1.0)
        return float((((values - mean).square() * weights).sum() / weights.sum()).sqrt())

    def settings(self) -> dict[str, float | int | None]:
        """Return what a file must hold of it, beside its name."""
        return {}

    def accuracy(self, probs: Tensor, targets: Tensor) -> float | None:
        """Return the share of right answers; None where there are no classes."""
        return None

    def probabilities(self, outputs: Tensor) -> Tensor:  # (..., O) -> (..., O)
        """Turn outputs into probabilities."""
        msg = f"A {self.name} likelihood has no class probabilities."
        raise LikelihoodError(msg)

    def entropy_terms(self, probs: Tensor) -> Tensor:  # (..., O) -> (..., O)
        """Return what each probability adds to the entropy."""
        terms: Tensor = torch.special.entr(probs)
        return terms

    def fitted(self, outputs: Tensor, targets: Tensor) -> Likelihood:
        """Return the likelihood with whatever it takes from the training data filled in."""
        return self


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) to rounding for every x; torch's own turns linear at 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def alike(wanted: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether two shapes are the same but for dimensions of one entry after the first."""
    return wanted[:1] == given[:1] and [d for d in wanted[1:] if d != 1] == [d for d in given[1:] if d != 1]
