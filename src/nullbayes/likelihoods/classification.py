"""Classification: one class per example, or per position of an example."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods.base import Likelihood, alike, shrunk, softplus

_NO_PROBABILITIES = (
    "Floating-point targets of shape {} are not class probabilities for {} classes: pass integer labels, "
    'or use likelihood="regression" or "multilabel".'
)
_AT_ONCE = 2**14  # outputs times samples that are processed in one step


@dataclass(frozen=True)
class Classification(Likelihood):
    """Logits over two or more classes, per example or per position.

    Targets are integer labels with the shape of the outputs without the classes, (n,) for outputs (n, C), or
    probabilities with the shape of the outputs.

    Parameters
    ----------
    class_dim : int, optional
        Dimension of the outputs that holds the classes, such as 1 for (n, C, H, W) or -1 for (n, T, C). By default it
        is found from the shape of the targets.
    ignore_index : int
        Label of positions that do not count: they have no loss, and their outputs have no rows.
    name : str
        Not to be changed: files store it.
    temperature : float
        Predicted probabilities are the softmax of the logits divided by it. The loss and the rows are always those of
        temperature 1, with which the network was trained.
    some_ignored, more_ignored : bool
        Set by a fit: whether training targets ignored some positions, and whether the inputs' ``attention_mask`` counts
        some of these.

    Examples
    --------
    >>> import torch
    >>> images = Classification(class_dim=1)
    >>> images.loss(torch.zeros(5, 2, 8, 8), torch.zeros(5, 8, 8, dtype=torch.long)).shape
    torch.Size([5])
    """

    class_dim: int | None = None
    ignore_index: int = -100
    name: str = "classification"
    temperature: float = 1.0
    some_ignored: bool = False
    more_ignored: bool = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a single logit, and labels that are not classes."""
        if outputs.shape[1:].numel() == 1:
            msg = (
                'The network has one output, but "classification" needs a logit for each class '
                '(softmax of one logit is always 1): use likelihood="binary" or "regression".'
            )
            raise LikelihoodError(msg)
        dim = self._dimension(outputs, targets)
        classes = outputs.shape[dim]
        if classes == 1:
            msg = (
                f"Of the outputs of shape {tuple(outputs.shape)}, dimension {dim} holds one class only: "
                'use likelihood="multilabel" for single logits.'
            )
            raise LikelihoodError(msg)
        if targets.is_floating_point():
            sums = targets.sum(dim)
            if not (bool(((sums - 1).abs() < 1e-3).all()) and targets.min() >= 0):
                msg = _NO_PROBABILITIES.format(tuple(targets.shape), classes)
                raise LikelihoodError(msg)
            return
        labels = targets.long()  # a narrow integer type would overflow in comparisons
        labels = labels[labels != self.ignore_index]
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= classes):
            msg = (
                f"Class labels run from {int(labels.min())} to {int(labels.max())}, but the network has {classes} "
                f"outputs: labels must be 0 to {classes - 1}, or ignore_index ({self.ignore_index})."
            )
            raise LikelihoodError(msg)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of each example, summed over its positions.

        It is computed as log(1 + Σ exp(f_c − f_y)) over the other classes. The relative error of its gradient is then
        of the size of rounding for confident examples too, where p_y − 1 would lose all digits. This matters because
        rows are scaled to unit length.
        """
        dim = self._dimension(outputs, targets)
        logits = outputs.movedim(dim, -1)  # (n, ..., C)
        if targets.is_floating_point():
            losses = -(targets.movedim(dim, -1).to(logits.dtype) * logits.log_softmax(-1)).sum(-1)
            return losses.flatten(1).sum(1) if losses.ndim > 1 else losses
        labels = targets.reshape(*logits.shape[:-1], 1).long()
        ignored = labels == self.ignore_index
        labels = labels.masked_fill(ignored, 0)
        margins = (logits - logits.gather(-1, labels)).scatter(-1, labels, -torch.inf)
        losses = softplus(margins.logsumexp(-1)).masked_fill(ignored[..., 0], 0.0)
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Multiply by :math:`L = (I - s s^\top)\operatorname{diag}(s)`, :math:`s = \sqrt p`, at each position.

        :math:`L^\top L = \operatorname{diag}(p) - p p^\top`.
        """
        dim = self._dimension(outputs, targets)
        s, moved = outputs.movedim(dim, -1).softmax(-1).sqrt(), values.movedim(dim, -1)
        return (s * moved - s * (s * s * moved).sum(-1, keepdim=True)).movedim(-1, dim)

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return which outputs are at positions that are not ignored."""
        if targets.is_floating_point():
            return None
        dim = self._dimension(outputs, targets)
        labels = targets.long().reshape(outputs.movedim(dim, -1).shape[:-1])
        return (labels != self.ignore_index).unsqueeze(dim).expand(outputs.shape)

    def positions(self, outputs: Tensor) -> tuple[int, ...]:
        """Return the shape of the outputs without the classes."""
        return _without(tuple(outputs.shape), self._classes)

    def at_positions(self, values: Tensor, *, largest: bool) -> Tensor:
        """Return the largest value or the sum over the classes at each position."""
        return values.amax(self._classes) if largest else values.sum(self._classes)

    def choices(self, outputs: Tensor) -> Tensor:  # (n, ...) -> (n, ..., C)
        """Return the logits with the classes in the last dimension."""
        return outputs.movedim(self._classes, -1)

    def choice_probabilities(self, probs: Tensor) -> Tensor:  # (n, ...) -> (n, ..., C)
        """Return the probabilities with the classes in the last dimension."""
        return probs.movedim(self._classes, -1)

    def over_choices(self, values: Tensor) -> Tensor:  # (n, ...)
        """Return the values: there is one decision per position."""
        return values

    def tempered(self, temperature: float) -> Likelihood:
        """Return the likelihood with logits divided by the temperature."""
        return replace(self, temperature=temperature)

    def link_variance(self, outputs: Tensor, changes: Tensor) -> Tensor:
        """Return the variance of the difference between each logit and that of the predicted class."""
        dim = self._classes - outputs.ndim if self._classes >= 0 else self._classes
        top = outputs.argmax(dim, keepdim=True)
        if changes.numel() <= _AT_ONCE:
            apart = changes - changes.gather(dim, top.expand(len(changes), *top.shape))
            return apart.square().sum(0) / (len(changes) - 1)
        total = torch.zeros_like(outputs)
        for change in changes:  # one sample at a time, to save memory
            total += (change - change.gather(dim, top)).square()
        return total / (len(changes) - 1)

    def probabilities(self, outputs: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the softmax; a variance shrinks the differences to the logit of the predicted class."""
        return self._logits(outputs, variance, self._classes).softmax(self._classes)

    def probit(self, outputs: Tensor, variance: Tensor) -> Tensor:
        """Return the softmax of logits that are shrunk by their own variances, as in laplace-torch.

        The predicted class may change if the variances of the classes differ.
        """
        dim, t = self._classes, self.temperature
        return shrunk(outputs / t, variance / t**2).softmax(dim)

    def bridge(self, outputs: Tensor, changes: Tensor) -> Tensor:  # (n, ...), (S, n, ...) -> (n, ...)
        """Return the mean of the Dirichlet distribution of the Laplace bridge.

        Logits are first conditioned on a sum of zero, as in Hobbhahn, Kristiadi and Hennig (2022). As the variances
        vanish, the mean tends to the softmax only if all classes have the same variance.
        """
        dim, t = self._classes, self.temperature
        f, c = outputs.movedim(dim, -1).double() / t, changes.movedim(dim, -1).double() / t
        rest, k, tiny = len(changes) - 1, f.shape[-1], torch.finfo(torch.float64).tiny
        own, with_sum = c.square().sum(0) / rest, (c * c.sum(-1, keepdim=True)).sum(0) / rest  # Σ_kk, Σ_l Σ_kl
        total = with_sum.sum(-1, keepdim=True).clamp_min(tiny)
        f = f - with_sum * f.sum(-1, keepdim=True) / total
        own = (own - with_sum.square() / total).clamp_min(1e-12)
        log_alpha = (1.0 - 2.0 / k + (f + (-f).logsumexp(-1, keepdim=True)).exp() / k**2).log() - own.log()
        return log_alpha.softmax(-1).movedim(-1, dim).to(outputs.dtype)

    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the negative log probability of each example's labels, summed over its positions."""
        dim = self._dimension(outputs, targets)
        wide = None if variance is None else variance.double()
        return self.loss(self._logits(outputs.double(), wide, dim), targets)[:, None]

    def n_targets(self, outputs: Tensor, targets: Tensor) -> int:
        """Return the number of positions whose label counts."""
        if targets.is_floating_point():
            return outputs.numel() // outputs.shape[self._dimension(outputs, targets)]
        return int((targets.long() != self.ignore_index).sum())  # in a narrow type, -100 may be a class

    @property
    def _classes(self) -> int:
        """The dimension of the classes, the last one if it was not given."""
        return -1 if self.class_dim is None else self.class_dim

    def _logits(self, outputs: Tensor, variance: Tensor | None, dim: int) -> Tensor:
        logits = outputs / self.temperature
        if variance is None:
            return logits
        return shrunk(logits - logits.amax(dim, keepdim=True), variance / self.temperature**2)

    def accuracy(self, probs: Tensor, targets: Tensor) -> float:
        """Return the share of correct classes among the positions that count."""
        dim = self._dimension(probs, targets)
        found = probs.argmax(dim)
        if targets.is_floating_point():
            return float((found == targets.argmax(dim)).double().mean())
        labels = targets.long().reshape(found.shape)
        return float((found == labels)[labels != self.ignore_index].double().mean())

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of the labels that are ignored."""
        ignored = torch.zeros_like(targets) if targets.is_floating_point() else targets.long() == self.ignore_index
        return ignored.double().mean()

    def fitted(self, outputs: Tensor, targets: Tensor, statistics: Tensor | None = None) -> Likelihood:
        """Return the likelihood with the dimension of the classes, counted from the end."""
        ignored = self.statistics(outputs, targets) if statistics is None else statistics
        return replace(self, class_dim=self._dimension(outputs, targets), some_ignored=float(ignored) > 0.0)

    def _dimension(self, outputs: Tensor, targets: Tensor) -> int:
        """Return the dimension of the classes, counted from the end; refuse targets whose shape does not fit."""
        n, ndim = len(outputs), outputs.ndim
        if self.class_dim is not None:
            dim = self.class_dim - ndim if self.class_dim >= 0 else self.class_dim
            if not 1 - ndim <= dim <= -1:
                msg = f"class_dim={self.class_dim} is not a dimension of outputs of shape {tuple(outputs.shape)}."
                raise LikelihoodError(msg)
            options = [dim]
        else:
            options = [-1] if ndim == 2 else sorted({1 - ndim, -1})
        if targets.is_floating_point():
            fitting = options if targets.shape == outputs.shape else []
        else:
            fitting = [d for d in options if alike((n, *_without(outputs.shape, d)[1:]), tuple(targets.shape))]
        if len(fitting) == 1:
            return fitting[0]
        shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
        if fitting:
            msg = f"Of {shapes}, either dimension 1 or the last may hold the classes: say which with "
            raise LikelihoodError(msg + "likelihood=nb.likelihoods.Classification(class_dim=...).")
        if targets.is_floating_point():
            raise LikelihoodError(_NO_PROBABILITIES.format(tuple(targets.shape), outputs.shape[options[0]]))
        wanted = " or ".join(str((n, *_without(outputs.shape, d)[1:])) for d in options)
        msg = (
            f"Class labels for {shapes} must have shape {wanted}; one-hot targets are passed as floats, "
            'several labels per example with likelihood="multilabel".'
        )
        raise LikelihoodError(msg)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)
