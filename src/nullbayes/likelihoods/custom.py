"""A loss of one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods.base import Likelihood, LossFn


@dataclass(frozen=True)
class CustomLoss(Likelihood):
    """A loss of one's own: ``function(outputs (n, ...), targets) -> (n,)``, differentiable, no reduction."""

    function: LossFn
    name: str = "custom"
    has_probabilities = has_closed_form = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a loss that is reduced, or not finite."""
        losses = self.function(outputs, targets)
        if not isinstance(losses, Tensor) or losses.shape != (len(outputs),):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            msg = (
                f"The loss must return one value an example, shape ({len(outputs)},), not {shape}: "
                'use reduction="none".'
            )
            raise LikelihoodError(msg)
        if not torch.isfinite(losses).all():
            msg = "The loss is NaN or Inf on the training data."
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example."""
        return self.function(outputs, targets)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Refuse: the curvature of a loss of one's own is not known here."""
        msg = "hessian=True needs a built-in likelihood; with a loss of your own use LossJacobian, or hessian=False."
        raise LikelihoodError(msg)

    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the loss of each example, which stands for minus a log-likelihood; there is no closed form."""
        if variance is not None:
            msg = "There is no closed form of the predictive density for a loss of your own."
            raise LikelihoodError(msg)
        return self.loss(outputs, targets).double()[:, None]

    def n_targets(self, outputs: Tensor, targets: Tensor) -> int:
        """Return the number of examples: a loss of one's own does not say how many targets it is of."""
        return len(outputs)
