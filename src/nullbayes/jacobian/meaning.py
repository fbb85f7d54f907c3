"""What outputs mean: probabilities taken for logits, labels that the model shifts by itself, a network that is dead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from nullbayes.errors import LikelihoodError, NullBayesWarning
from nullbayes.jacobian.autograd import ordinary, recording
from nullbayes.jacobian.batches import map_leaves
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood

_PASSING = {  # operations that move numbers and leave them as they are
    "AliasBackward", "CloneBackward", "IndexBackward", "PermuteBackward", "ReshapeAliasBackward", "SelectBackward",
    "SliceBackward", "SqueezeBackward", "TBackward", "ToCopyBackward", "TransposeBackward", "UnsafeViewBackward",
    "UnsqueezeBackward", "ViewBackward",
}  # fmt: skip
_SUM_TOLERANCE = 1e-3  # of probabilities, which may come from half precision
_SAME = 1e-6  # of the size of the outputs: as much as rounding makes them differ
_ENOUGH = 20  # examples to judge by, where values alone speak
_LOSSES_AGREE = 0.02  # of their size
_LOGS = (
    "Pass the network without it, or output_fn=lambda p: p.clamp_min(1e-12).log(), whose softmax gives the same "
    "probabilities."
)
_LOGITS = (
    "Pass the network without it, or output_fn=lambda p: p.logit(1e-7), whose sigmoid gives the same probabilities."
)


def check_ending(network: Network, likelihood: Likelihood, x: Any) -> None:
    """Refuse a network that ends in the softmax or the sigmoid that the likelihood applies to its outputs."""
    if not isinstance(likelihood, (Bernoulli, Classification)):
        return
    with recording(), network.lock:
        theta = network.theta.clone().requires_grad_()
        last = _last_operation(network(theta, map_leaves(ordinary, x)))
    if isinstance(likelihood, Classification) and last == "SoftmaxBackward":
        msg = f'The network ends in a softmax: "classification" takes logits, and would apply a second one. {_LOGS}'
        raise LikelihoodError(msg)
    if isinstance(likelihood, Bernoulli) and last == "SigmoidBackward":
        msg = (
            f'The network ends in a sigmoid: "{likelihood.name}" takes logits, and would apply a second one. {_LOGITS}'
        )
        raise LikelihoodError(msg)


def check_values(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Refuse outputs on the training data that are probabilities; warn of those that may be, or are all the same."""
    if isinstance(likelihood, Classification):
        sums = likelihood.at_positions(outputs, largest=False)
        if float(outputs.min()) >= 0.0 and float((sums - 1.0).abs().max()) <= _SUM_TOLERANCE:
            msg = f'The outputs are probabilities: they sum to 1. "classification" takes logits. {_LOGS}'
            raise LikelihoodError(msg)
    if isinstance(likelihood, Bernoulli) and len(outputs) >= _ENOUGH and _like_probabilities(outputs, targets):
        message = (
            "All outputs lie between 0 and 1, and explain the targets better as probabilities than as logits, which "
            f'"{likelihood.name}" takes them for. If the network ends in something like a sigmoid: {_LOGITS}'
        )
        warnings.warn(message, NullBayesWarning, stacklevel=2)
    size = float(outputs.double().square().mean().sqrt())
    if len(outputs) >= _ENOUGH and float((outputs - outputs[:1]).abs().max()) <= _SAME * size:
        message = (
            f"The network gives the same outputs for all {len(outputs):,} training examples: it is dead, or was not "
            "trained, and a posterior of it cannot tell inputs apart."
        )
        warnings.warn(message, NullBayesWarning, stacklevel=2)


def compare_with_mask(likelihood: Likelihood, x: Any, y: Tensor) -> tuple[bool, bool]:
    """Return whether labels count where the input's own mask does not, and are ignored where it counts."""
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if not isinstance(likelihood, Classification) or not isinstance(mask, Tensor) or y.is_floating_point():
        return False, False
    if mask.shape != y.shape:
        return False, False
    counts, ignored = mask.bool(), y == likelihood.ignore_index
    return bool((~ignored & ~counts).any()), bool((ignored & counts).any())


def check_labels(network: Network, likelihood: Likelihood, x: Any, y: Tensor, outputs: Tensor) -> None:
    """Refuse labels that the model itself shifts by one position, as causal language models do.

    The model is asked for its own loss, if it takes labels by that name and the batch is a mapping.
    """
    if not (isinstance(likelihood, Classification) and isinstance(x, Mapping)) or y.is_floating_point():
        return
    if outputs.ndim != 3 or y.shape != outputs.shape[:2] or y.shape[1] < 2:
        return
    theirs = _own_loss(network, x, y)
    if theirs is None:
        return
    logits, labels, ignore = outputs.double(), y.long(), likelihood.ignore_index
    plain, shifted = (
        float(cross_entropy(f.flatten(0, 1), t.flatten(), ignore_index=ignore))
        for f, t in ((logits, labels), (logits[:, :-1], labels[:, 1:]))
    )
    if abs(theirs - shifted) <= _LOSSES_AGREE * max(shifted, 0.05) < plain - theirs:
        msg = (
            f"The model shifts its labels by one position: its own loss on the first batch is {theirs:.3g}, that of "
            f"the labels as they are {plain:.3g}. Shift them for nullbayes, which does not: batch_fn=lambda batch: "
            "({key: batch[key] for key in batch if key != 'labels'}, "
            f"torch.nn.functional.pad(batch['labels'][:, 1:], (0, 1), value={ignore}))."
        )
        raise LikelihoodError(msg)


def _last_operation(outputs: Tensor) -> str:
    """Return the name of the operation that outputs come from, but for what moves them around."""
    node = outputs.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _PASSING and node.next_functions:
        node = node.next_functions[0][0]
    return "" if node is None else node.name().rstrip("0123456789")


def _like_probabilities(outputs: Tensor, targets: Tensor) -> bool:
    p, y = outputs.double(), targets.reshape(outputs.shape).double()
    if not (float(p.min()) >= 0.0 and float(p.max()) <= 1.0):
        return False
    as_logits = Bernoulli("binary").nll_terms(p, y).mean()
    inside = p.clamp(1e-7, 1.0 - 1e-7)
    return bool(-(y * inside.log() + (1.0 - y) * (1.0 - inside).log()).mean() < as_logits)


def _own_loss(network: Network, x: Mapping[str, Any], y: Tensor) -> float | None:
    """Return the loss that a model computes from labels, if it does."""
    if "labels" not in inspect.signature(network.module.forward).parameters:
        return None
    with torch.no_grad(), network.lock:
        try:
            returned = functional_call(network.module, network.unflatten(network.theta), (), {**x, "labels": y})
        except Exception:  # labels mean something else to it
            return None
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None
