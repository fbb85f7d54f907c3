"""How the numbers of an input look as a whole, next to those of training inputs, whatever the network makes of them.

A black picture, a sensor that is dead and pixels that were not scaled can have the features of a familiar input, or
those of a more than familiar one. Three plain numbers of each tensor show such inputs: the mean of its entries, the
logarithm of their spread, and the logarithm of their roughness, which is the mean difference of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nullbayes.jacobian.batches import named_leaves

_BYTES = (torch.uint8, torch.int8)  # of images
_SMALLEST = 1e-30  # of a spread, before its logarithm is taken
_ROUNDING = 1e-2  # of the spread of an input, or of a logarithm: differences that are nothing


def looks(x: Any) -> Tensor | None:  # (n, 3 k) float64
    """Return mean, log spread and log roughness of k tensors of each input; None where all are tokens."""
    found = [column for leaf in named_leaves(x) if _counts(leaf) for column in _looks(leaf)]
    return torch.stack(found, 1) if found else None


def _counts(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() and leaf.ndim > 1) or (leaf.dtype in _BYTES and leaf.ndim == 4)


def _looks(leaf: Tensor) -> Iterator[Tensor]:  # (n,) each
    values = leaf if leaf.dtype == torch.float64 else leaf.float()
    yield values.flatten(1).mean(1).double()
    yield values.flatten(1).std(1, correction=0).double().clamp_min(_SMALLEST).log()
    axis = max((i for i in range(1, leaf.ndim) if leaf.shape[i] > 1), default=None)
    steps = torch.zeros_like(values) if axis is None else values.diff(dim=axis).abs()
    yield steps.flatten(1).mean(1).double().clamp_min(_SMALLEST).log()


def usual_looks(known: Tensor) -> Tensor:  # (n, 3 k) -> (2, 3 k)
    """Return the mean and the standard deviation of what training inputs look like."""
    mean, spread = known.mean(0), known.std(0, unbiased=False)
    least = torch.full_like(spread, _ROUNDING)
    least[::3] *= mean[1::3].exp()  # inputs that were each normalized have means that are rounding errors
    return torch.stack([mean, spread.maximum(least).clamp_min(_SMALLEST)])


def unlike(usual: Tensor, found: Tensor) -> Tensor:  # (2, 3 k), (n, 3 k) -> (n,)
    """Return by how many standard deviations the most unusual of these numbers differs from training inputs."""
    mean, spread = usual.to(found.device)
    most: Tensor = ((found - mean) / spread).abs().amax(1)
    return most
