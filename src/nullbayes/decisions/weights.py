"""Weights of statistics, learned from familiar inputs and artificial strangers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

_STEPS, _RIDGE, _LIMIT = 3000, 1e-3, 8.0
_SMALLEST = 3e-7  # a standard deviation, relative to the mean, that is rounding
_UNIT = 0.125  # the scale of a constant, whose rounding errors may be a whole unit: see `_scales`
_OF_SIZE = 1e-6  # and relative to its size
_USELESS = 1e-6  # the sum of weights that are rounding errors
_LARGEST = 1e30  # in place of what is not finite
_USUAL = 1.0  # standard deviations below the mean that are nothing unusual
_LOWEST = 0.01  # of the training data may have a statistic that is lower than what counts as usual


@dataclass(frozen=True)
class Weights:
    """A weighted sum of how far each statistic is above its mean, in standard deviations: ``high(z) @ weights``.

    With ``z = (statistics - mean) / scale`` and ``high(z) = log(1 + exp(2 z)) / 2``, a low statistic does not make up
    for others that are high: what a network is certain of may be strange all the same, and so may what is near to some
    training example.

    A statistic far beyond all that was seen of familiar inputs counts whatever its weight: what exceeds its bound is
    added to the sum, or to that of average familiar inputs where the sum is lower. Otherwise an absurd input could
    pass, because a statistic that tells it was of no use among the strangers, or because the network is certain of it.

    With weights ``low``, a statistic that is unusually low counts as well: a row of a table with means in place of all
    missing numbers is nearer to the data than data are. What training data have is not unusual: their distance to
    themselves is zero, and so is nearly their variance.
    """

    weights: tuple[float, ...]  # not negative, with the sum one
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    bound: tuple[float, ...]  # of z
    low: tuple[float, ...] = ()  # not negative; the sum one is that of both
    usual: tuple[float, ...] = ()  # of -z: what is at most as far below the mean is not low

    def __call__(self, statistics: Tensor) -> Tensor:  # (n, k) -> (n,)
        """Return one score per input; an input with a statistic that is not finite is very strange."""
        parts = (self.mean, self.scale, self.weights, self.bound)
        mean, scale, weights, bound = (statistics.new_tensor(part) for part in parts)
        z, broken = ((statistics - mean) / scale).nan_to_num(), ~torch.isfinite(statistics).all(1)
        sides = torch.cat([weights, statistics.new_tensor(self.low)])
        total, beyond = _sides(z, self.usual) @ sides, (z - bound).clamp_min(0.0).sum(1)
        average = _sides(torch.zeros_like(z[:1]), self.usual) @ sides
        total = torch.where(beyond > 0.0, total.maximum(average) + beyond, total)
        return total.masked_fill(broken, _LARGEST)


def _sides(z: Tensor, usual: Sequence[float]) -> Tensor:  # (n, k) -> (n, k) or (n, 2 k)
    """Return what the weights multiply: how far each statistic is above its mean, and how far it is below the usual."""
    high = softplus(2.0 * z) / 2.0
    return torch.cat([high, (-z - z.new_tensor(usual)).clamp_min(0.0)], dim=1) if usual else high


def learn_weights(
    familiar: Tensor, strange: Mapping[str, Tensor], trained: Tensor | None = None, unweighed: Sequence[int] = ()
) -> Weights:
    """Learn which statistics tell familiar inputs from strange ones.

    Parameters
    ----------
    familiar : Tensor (n, k)
        Statistics of familiar inputs in float64; each is higher for stranger inputs.
    strange : mapping of str to Tensor (m, k)
        Statistics of strangers, by kind. All kinds together count as much as the familiar inputs, and each kind as much
        as any other.
    trained : Tensor (t, k), optional
        Statistics of training data. With these, statistics that are unusually low count, too: lower than those of most
        familiar inputs, and lower than those of training data.
    unweighed : sequence of int
        Statistics whose weight is zero, so that they count only where they are beyond their bounds.

    Returns
    -------
    Weights
        Equal weights, if no statistic tells them apart.

    Notes
    -----
    Logistic regression with a small ridge and weights that are not negative, by accelerated projected gradients. A
    statistic that ranks strangers below familiar inputs gets the weight zero. Statistics are clipped at eight standard
    deviations while learning, so that a kind of stranger that is easy to tell does not decide the weights.
    """
    mean, scale, varies = _scales(familiar)
    usable = varies.clone()
    usable[list(unweighed)] = False
    usual = () if trained is None else _usual((trained - mean) / scale)
    groups = [((x - mean) / scale * usable).clamp(-_LIMIT, _LIMIT) for x in (familiar, *strange.values())]
    x = _sides(torch.cat(groups), usual)
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    sign = torch.ones_like(x[:, 0])
    sign[: len(familiar)] = -1.0
    shares = [0.5, *(0.5 / len(strange) for _ in strange)]
    share = torch.cat([x.new_full((len(g),), s / len(g)) for g, s in zip(groups, shares, strict=True)])
    ridge = x.new_full((x.shape[1],), 2 * _RIDGE)
    ridge[-1] = 0.0
    step = 1.0 / (0.25 * torch.linalg.matrix_norm(x * share[:, None].sqrt(), 2) ** 2 + 2 * _RIDGE)
    found = ahead = torch.zeros_like(x[0])
    momentum = 1.0
    for _ in range(_STEPS):
        slope = -(share * sign * torch.sigmoid(-sign * (x @ ahead))) @ x + ridge * ahead
        new = ahead - step * slope
        new[:-1].clamp_(min=0.0)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / following * (new - found)
        done = (new - found).norm() <= 1e-9 * (1 + new.norm())
        found, momentum = new, following
        if done:
            break
    weights = found[:-1] * usable.repeat(2 if usual else 1)
    if not strange or not float(weights.sum()) > _USELESS:
        weights = torch.zeros_like(weights)
        weights[: len(usable)] = usable.to(weights) if bool(usable.any()) else 1.0
    high, low = (weights / weights.sum()).tensor_split([len(usable)])
    z = (familiar - mean) / scale
    bound = 2.0 * z.amax(0) - z.median(0).values  # as far beyond the largest as that is beyond the middle
    bound = torch.where(varies, bound, torch.full_like(bound, 1.0 / _UNIT))
    parts = {"weights": high, "mean": mean, "scale": scale, "bound": bound, "low": low}
    return Weights(**{name: tuple(part.tolist()) for name, part in parts.items()}, usual=usual)


def _scales(familiar: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (n, k) -> (k,) each
    """Return mean and scale of each statistic, and whether it varies: a constant says nothing about the weights.

    A constant has a scale and a bound all the same, because what is clearly above it is beyond everything that was
    seen. Statistics are logarithms or of their size. One that is constant because it is as small as rounding lets it be
    may vary by a whole unit in another batch. So one unit above the constant is the bound, and each further one counts
    as eight standard deviations.
    """
    mean, scale = familiar.mean(0), familiar.std(0)
    usable = scale > _SMALLEST * (1.0 + mean.abs())
    return mean, torch.where(usable, scale, _UNIT * (1.0 + _OF_SIZE * mean.abs())), usable


def _usual(z: Tensor) -> tuple[float, ...]:  # (t, k)
    """Return how far below the mean nearly all training data are, at least what is nothing unusual."""
    lowest = z[torch.isfinite(z).all(1)].sort(0).values
    at = min(int(_LOWEST * len(lowest)), len(lowest) - 1)
    return tuple((-lowest[at]).clamp_min(_USUAL).tolist() if len(lowest) else [_USUAL] * z.shape[1])
