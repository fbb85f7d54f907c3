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
_BINARY = 1e-5  # by which rounding may change the variance of zeros and ones
_ROUNDING = 1e-2  # of the spread of an input, or of a logarithm: differences that are nothing
_OF_SIZE = 1e-6  # of the mean of all inputs: what rounding leaves of the spread of a constant
_HUGE = 1e15  # larger numbers, such as in masks that are added to logits, have no squares in single precision


def looks(x: Any) -> Tensor | None:  # (n, 3 k) float64
    """Return mean, log spread and log roughness of k tensors of each input; None where all are tokens."""
    found = [column for leaf in named_leaves(x) if _counts(leaf) for column in _looks(leaf)]
    return torch.stack(found, 1) if found else None


def _counts(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() and leaf.ndim > 1) or (leaf.dtype in _BYTES and leaf.ndim == 4)


def _looks(leaf: Tensor) -> Iterator[Tensor]:  # (n,) each
    values = leaf if leaf.dtype == torch.float64 else leaf.float()
    values = values.double() if bool((values.abs() > _HUGE).any()) else values
    yield values.flatten(1).mean(1).double()
    yield values.flatten(1).std(1, correction=0).double().clamp_min(_SMALLEST).log()
    axis = max((i for i in range(1, leaf.ndim) if leaf.shape[i] > 1), default=None)
    steps = torch.zeros_like(values) if axis is None else values.diff(dim=axis).abs()
    yield steps.flatten(1).mean(1).double().clamp_min(_SMALLEST).log()


def usual_looks(known: Tensor) -> Tensor:  # (n, 3 k) -> (2, 3 k)
    """Return the mean and the standard deviation of what training inputs look like.

    Of tensors of zeros and ones alone, such as masks, the standard deviations are so large that nothing exceeds them: a
    mask that covers nothing is nothing strange, though no training input had one.
    """
    known = _above_rounding(known, known[:, ::3].mean(0))
    mean, spread = known.mean(0), known.std(0, unbiased=False)
    least = torch.full_like(spread, _ROUNDING)
    least[::3] *= mean[1::3].exp()  # inputs that were each normalized have means that are rounding errors
    least[::3] += _OF_SIZE * mean[::3].abs()
    spread = spread.maximum(least).clamp_min(_SMALLEST)
    seen = ((2.0 * known[:, 1::3]).exp() > 10.0 * _BINARY).any(0)  # faint signals have no variance to tell this by
    binary = (_off_binary(known) <= 1.0).all(0) & seen
    spread[binary.repeat_interleave(3)] = torch.finfo(spread.dtype).max
    return torch.stack([mean, spread])


def _above_rounding(found: Tensor, middle: Tensor) -> Tensor:  # (n, 3 k), (k,) -> (n, 3 k)
    """Return the numbers with spreads and roughness of at least what rounding may leave of them in another batch.

    Otherwise constants would be unlike themselves: the spread of each is zero, or its last digit.
    """
    least = (_OF_SIZE * middle.abs()).clamp_min(_SMALLEST).log()
    return found.maximum(torch.stack([torch.full_like(least, -torch.inf), least, least], 1).flatten())


def _off_binary(found: Tensor) -> Tensor:  # (n, 3 k) -> (n, k)
    """Return how far tensors are from zeros and ones, whose variance is the mean times one minus the mean."""
    middle, variance = found[:, ::3], (2.0 * found[:, 1::3]).exp()
    return (variance - middle * (1.0 - middle)).abs() / _BINARY


def unlike(usual: Tensor, found: Tensor) -> Tensor:  # (2, 3 k), (n, 3 k) -> (n,)
    """Return by how many standard deviations the most unusual of these numbers differs from training inputs.

    Other numbers where training inputs had zeros and ones alone are many standard deviations away.
    """
    mean, spread = usual.to(found.device)
    found = _above_rounding(found, mean[::3])
    binary = spread[::3] == torch.finfo(spread.dtype).max
    most: Tensor = torch.cat([((found - mean) / spread).abs(), _off_binary(found)[:, binary]], 1).amax(1)
    return most
