"""Checks of inputs that come in the wrong form: parts with names (arguments, masks, labels), or in another order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from nullbayes.errors import LikelihoodError
from nullbayes.jacobian.batches import TARGETS, leaves, map_leaves
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Classification, Likelihood

_LOSSES_AGREE = 0.02  # of their size
_KEY = "Where the targets have another key than 'labels', write that."


def if_swapped(network: Network, x: Any, targets: Tensor) -> str:
    """Return a sentence if a network takes the targets where it failed on the inputs; else nothing.

    Where inputs are as many numbers as targets, as those of an autoencoder are, they may have another type or shape
    than the network takes. Bytes of images may have another type alone, where a network takes images of every size.
    Negative labels are to be ignored: an embedding on a GPU fails for good on such an index.
    """
    whole = not targets.is_floating_point()
    if any(leaf.numel() == targets.numel() for leaf in leaves(x)) or (whole and bool((targets < 0).any())):
        return ""
    n = len(targets)
    if _takes(network, map_leaves(lambda leaf: leaf.to(network.dtype), x), n):
        return ""
    if not _takes(network, targets if whole else targets.to(network.dtype), n):
        return ""
    return ". It takes the targets in their place: if they were swapped, pass (inputs, targets), in this order."


def _takes(network: Network, x: Any, n: int) -> bool:
    """Return whether a network answers inputs with an output for each of so many examples."""
    try:
        with torch.no_grad():
            return len(network.outputs(x)) == n
    except Exception:  # what the user's network says of inputs that it does not take
        return False


def by_name(network: Network, x: Mapping[str, Any]) -> str:
    """Say how to pass the parts of a mapping to a network that does not take all of them by name."""
    taken = list(inspect.signature(network.module.forward).parameters)
    kept = [name for name in x if name in taken]
    inputs = "{" + ", ".join(f"{name!r}: batch[{name!r}]" for name in kept or x if name not in TARGETS) + "}"
    if kept or len(taken) != 1:
        written = f"batch_fn=lambda batch: ({inputs}, batch['labels'])"
        return f". Leave out what it does not take; of a loader, {written}. {_KEY}"
    written = f"batch_fn=lambda batch: (({inputs},), batch['labels'])"
    return (
        ". If it takes one dict, put that into a tuple, because the parts of a mapping are passed by name: "
        f"fit(({{...}},), y), or of a loader {written}. {_KEY} Later calls take the same form, predict(({{...}},))."
    )


def compare_with_mask(likelihood: Likelihood, x: Mapping[str, Any], y: Tensor) -> tuple[bool, bool]:
    """Return whether labels count where the mask of the input is 0, and whether they are ignored where it is 1."""
    mask = x.get("attention_mask")
    if not isinstance(likelihood, Classification) or not isinstance(mask, Tensor) or y.is_floating_point():
        return False, False
    if mask.shape != y.shape:
        return False, False
    counts, ignored = mask.bool(), y == likelihood.ignore_index
    return bool((~ignored & ~counts).any()), bool((ignored & counts).any())


def check_labels(network: Network, likelihood: Likelihood, x: Mapping[str, Any], y: Tensor, outputs: Tensor) -> None:
    """Refuse labels that the model itself shifts by one position, as causal language models do.

    The model is asked for its own loss, if it takes labels by that name.
    """
    if not isinstance(likelihood, Classification) or y.is_floating_point():
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


def _own_loss(network: Network, x: Mapping[str, Any], y: Tensor) -> float | None:
    """Return the loss that a model computes from labels; None if it does not."""
    if "labels" not in inspect.signature(network.module.forward).parameters:
        return None
    with torch.no_grad(), network.lock:
        try:
            returned = functional_call(network.module, network.unflatten(network.theta), (), {**x, "labels": y})
        except Exception:  # labels mean something else to it
            return None
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None
