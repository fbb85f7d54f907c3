"""Split conformal prediction: p-values and quantiles from the scores of held-out data.

All guarantees rest on one assumption: the held-out examples and the new one are exchangeable, for example drawn
independently from the same distribution. Then the rank of the new score among the held-out scores is uniform, whatever
the score is.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import SettingsError, warn
from nullbayes.jacobian.batches import is_array

_OF_SPREAD, _OF_SIZE = 1e-4, 1e-5  # by which scores of equal inputs may differ, in batches of different sizes
_TIES = 0.1  # of the held-out scores may be as near to the next as that
_OF_ERROR = 1e-6  # by which their errors may differ


def p_values(held_out: Tensor, scores: Tensor) -> Tensor:  # (m,), (...) -> (...)
    r"""Return the probability that a familiar input has a score at least as high.

    :math:`p = (1 + \#\{i : s_i \ge s\}) / (m + 1)`. For an exchangeable input :math:`P(p \le \alpha) \le \alpha`.

    Scores of equal inputs differ a little in batches of different sizes. So held-out scores that are smaller than
    :math:`s` by no more than rounding count as equal to it, which can only make p larger. NaN is larger than every
    number.
    """
    ordered = held_out.sort().values
    scores = scores.to(ordered)
    rounding = _OF_SPREAD * (ordered - ordered.median()).abs().median() + _OF_SIZE * scores.abs()
    smaller = torch.searchsorted(ordered, torch.where(scores.isinf(), scores, scores - rounding))
    return (1.0 + (len(ordered) - smaller)).to(ordered.dtype) / (len(ordered) + 1.0)


def n_equal(held_out: Tensor, scores: Tensor) -> int:  # (m,), (n,)
    """Return how many scores are those of held-out inputs, up to rounding; zero where held-out scores have ties."""
    ordered, spread = held_out.sort().values, (held_out - held_out.median()).abs().median()
    apart = ordered.diff() > _OF_SPREAD * spread
    if not bool(spread > 0) or float(apart.double().mean()) < 1.0 - _TIES:
        return 0
    near = torch.searchsorted(ordered, scores.to(ordered)).clamp(1, len(ordered) - 1)
    distance = torch.minimum((scores - ordered[near]).abs(), (scores - ordered[near - 1]).abs())
    return int((distance <= 0.1 * _OF_SPREAD * spread).sum())


def quantile(held_out: Tensor, alpha: float) -> Tensor:  # (m, ...) -> (...)
    """Return the value that a new score exceeds with probability at most ``alpha``; infinite if m is too small."""
    rank = math.ceil((len(held_out) + 1) * (1.0 - alpha) - 1e-9)
    if rank > len(held_out):
        return torch.full_like(held_out[0], math.inf)
    return held_out.sort(dim=0).values[rank - 1]


def beyond_rounding(limit: Tensor) -> Tensor:
    """Return a limit on errors that an equal error does not exceed by rounding."""
    return torch.where(limit.isinf(), limit, limit + _OF_ERROR * limit.abs())


def _in_percent(alpha: Any) -> str:
    """Say what is probably meant by a level in percent, or by a rate of errors in percent."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1.0 < alpha < 100.0:
        return ""
    level = alpha >= 50.0
    what = f"a level of {alpha:g} %" if level else f"{alpha:g} %"
    return f" It is the rate of errors: for {what} pass {(100.0 - alpha if level else alpha) / 100.0:.2g}."


def check_alpha(alpha: float, m: int) -> float:
    """Return a level, or refuse one that is no probability, or that so few held-out examples cannot reach."""
    given: Any = alpha
    if (is_array(given) and given.ndim) or isinstance(given, (list, tuple)):
        msg = (
            "Decisions take inputs alone, without labels: write is_ood(x), or is_ood(x, alpha=0.05); several inputs "
            "of a network are one tuple, is_ood((a, b)). alpha must be a number between 0 and 1, not a "
            f"{type(given).__name__} of {len(given):,}."
        )
        raise SettingsError(msg)
    if isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0.0 < alpha < 1.0:
        msg = f"alpha must be a number between 0 and 1, such as 0.05, not {alpha!r}.{_in_percent(given)}"
        raise SettingsError(msg)
    if alpha >= 0.8:
        warn(f"alpha={alpha:g} is the probability of an error. For a level of {alpha:.0%} pass {1.0 - alpha:.2g}.")
    if alpha * (m + 1) < 1.0 - 1e-9:
        msg = (
            f"alpha={alpha:g} needs at least {math.ceil(1.0 / alpha - 1e-9) - 1:,} held-out scores to compare with; "
            f"calibrate left {m:,}: calibrate with more data, or choose a larger alpha."
        )
        raise SettingsError(msg)
    return float(alpha)
