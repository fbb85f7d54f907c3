r"""Likelihoods: a loss for each example, its curvature in output space, and what outputs mean as probabilities.

Outputs are (n, O) throughout. A likelihood that does not fit the outputs or the targets is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nullbayes.errors import LikelihoodError

LossFn = Callable[[Tensor, Tensor], Tensor]  # outputs (n, O), targets -> losses (n,)


class Likelihood(ABC):
    """What the outputs say about the targets."""

    name: str
    has_probabilities: bool = True

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs (n, O) and targets that do not fit."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, O) -> (n,)
        """Return minus the log-likelihood of each example (up to a constant for a Gaussian)."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, O) -> (n, O, O)
        r"""Return :math:`L` with :math:`L^\top L` the Hessian of the loss in the outputs."""

    def probabilities(self, outputs: Tensor) -> Tensor:  # (..., O) -> (..., O)
        """Turn outputs into probabilities."""
        msg = f"A {self.name} likelihood has no class probabilities."
        raise LikelihoodError(msg)

    def entropy(self, probs: Tensor) -> Tensor:  # (..., O) -> (...)
        """Return the entropy of probabilities."""
        terms: Tensor = torch.special.entr(probs)
        return terms.sum(-1)

    def fitted(self, outputs: Tensor, targets: Tensor) -> Likelihood:
        """Return the likelihood with whatever it takes from the training data filled in."""
        return self


@dataclass(frozen=True)
class Classification(Likelihood):
    """Logits over two or more classes; integer targets (n,), or probabilities (n, O)."""

    name: str = "classification"

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a single logit, and labels that are not class numbers."""
        classes = outputs.shape[1]
        if classes == 1:
            msg = (
                'The network has one output, but "classification" needs a logit for each class '
                '(softmax of one logit is always 1): use likelihood="binary".'
            )
            raise LikelihoodError(msg)
        if targets.is_floating_point():
            ok = (
                targets.shape == outputs.shape
                and bool(((targets.sum(1) - 1).abs() < 1e-3).all())
                and targets.min() >= 0
            )
            if not ok:
                msg = (
                    f"Floating-point targets of shape {tuple(targets.shape)} are no class probabilities for {classes} "
                    'classes: pass integer labels (n,), or use likelihood="regression" or "multilabel".'
                )
                raise LikelihoodError(msg)
            return
        _check_labels(targets, classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of each example.

        Written as log(1 + Σ exp(f_c − f_y)) over the other classes: its gradient is then exact to rounding *relative to
        its length*, where p_y − 1 would lose all digits of a confident example, whose row is scaled up to unit length.
        """
        if targets.is_floating_point():
            return functional.cross_entropy(outputs, targets, reduction="none")
        labels = targets.reshape(len(outputs), 1).long()
        margins = (outputs - outputs.gather(1, labels)).scatter(1, labels, -torch.inf)
        return _softplus(margins.logsumexp(1))

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Return :math:`(I - s s^\top)\operatorname{diag}(s)`, with :math:`s = \sqrt p`.

        Its square is diag(p) − p p⊤.
        """
        s = outputs.softmax(-1).sqrt()
        return (torch.eye(s.shape[-1], dtype=s.dtype, device=s.device) - s[:, :, None] * s[:, None, :]) * s[:, None, :]

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the softmax."""
        return outputs.softmax(-1)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent logits, each with a target 0 or 1: "binary" has one, "multilabel" several."""

    name: str

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse the wrong number of logits, and targets that are not 0 or 1."""
        width = outputs.shape[1]
        if self.name == "binary" and width != 1:
            msg = (
                f'"binary" takes one logit an example, but the network has {width} outputs: '
                'use "classification" or "multilabel".'
            )
            raise LikelihoodError(msg)
        if targets.numel() != outputs.numel():
            msg = (
                f"{self.name} targets must be one 0 or 1 for each of the {width} logits, "
                f"not shape {tuple(targets.shape)}."
            )
            raise LikelihoodError(msg)
        if not bool(((targets == 0) | (targets == 1)).all()):
            msg = f"{self.name} targets must be 0 or 1; found {float(targets.min()):g} to {float(targets.max()):g}."
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the binary cross entropies of each example, exact to rounding for confident ones too."""
        signs = 1.0 - 2.0 * targets.reshape(outputs.shape).to(outputs.dtype)
        return _softplus(signs * outputs).sum(-1)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the diagonal of sqrt(p (1 − p))."""
        p = outputs.sigmoid()
        return torch.diag_embed((p * (1 - p)).sqrt())

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the sigmoid."""
        return outputs.sigmoid()

    def entropy(self, probs: Tensor) -> Tensor:
        """Return the summed entropies of the two-sided coins."""
        terms: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
        return terms.sum(-1)


@dataclass(frozen=True)
class Regression(Likelihood):
    r"""Gaussian with one standard deviation for all outputs, given or fitted.

    Parameters
    ----------
    sigma_noise : float, optional
        The standard deviation; by default the root mean square of the training residuals at the trained network.
    """

    sigma_noise: float | None = None
    name: str = "regression"
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
        if targets.numel() != outputs.numel():
            msg = (
                f"Regression targets of shape {tuple(targets.shape)} "
                f"do not fit outputs of shape {tuple(outputs.shape)}."
            )
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return half the squared residual over the variance, summed over the outputs."""
        residual = (outputs - targets.reshape(outputs.shape).to(outputs.dtype)) / (self.sigma_noise or 1.0)
        return 0.5 * residual.square().sum(-1)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the identity over the standard deviation."""
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        return (eye / (self.sigma_noise or 1.0)).expand(len(outputs), -1, -1)

    def fitted(self, outputs: Tensor, targets: Tensor) -> Likelihood:
        """Return the likelihood with the standard deviation of the residuals."""
        if self.sigma_noise is not None:
            return self
        residual = outputs.double() - targets.reshape(outputs.shape).double()
        return Regression(max(float(residual.square().mean().sqrt()), 1e-12))


@dataclass(frozen=True)
class CustomLoss(Likelihood):
    """A loss of one's own: ``function(outputs (n, O), targets) -> (n,)``, differentiable, no reduction."""

    function: LossFn
    name: str = "custom"
    has_probabilities = False

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

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Refuse: the curvature of a loss of one's own is not known here."""
        msg = "hessian=True needs a built-in likelihood; with a loss of your own use LossJacobian, or hessian=False."
        raise LikelihoodError(msg)


def resolve(likelihood: str | Likelihood | LossFn) -> Likelihood:
    """Return the likelihood that a name, a likelihood or a per-example loss stands for."""
    named: dict[str, Likelihood] = {
        "classification": Classification(),
        "binary": Bernoulli("binary"),
        "multilabel": Bernoulli("multilabel"),
        "regression": Regression(),
    }
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str):
        if likelihood not in named:
            msg = (
                f"likelihood={likelihood!r} is not one of {', '.join(named)}, "
                "nor a callable (outputs, targets) -> losses."
            )
            raise LikelihoodError(msg)
        return named[likelihood]
    if callable(likelihood):
        return CustomLoss(likelihood)
    msg = f"likelihood must be a name, a Likelihood or a callable, not {type(likelihood).__name__}."
    raise LikelihoodError(msg)


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) to rounding for every x; torch's own turns linear at 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _check_labels(targets: Tensor, classes: int) -> None:
    if targets.numel() != len(targets):
        msg = f"Class labels must have shape (n,), not {tuple(targets.shape)}: one-hot targets are passed as floats."
        raise LikelihoodError(msg)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= classes:
        msg = (
            f"Class labels run from {low} to {high}, but the network has {classes} outputs: "
            f"labels must be 0 to {classes - 1}."
        )
        raise LikelihoodError(msg)
