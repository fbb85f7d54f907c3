"""Axes of a figure: which part of the numbers is shown, and where ticks with sensible labels stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nullbayes.page.numerals import fixed, power, scientific

_MOST = 1e300  # larger numbers are shown at the end: their differences would overflow
_LEAST = 1e-280  # of a logarithmic axis
_COUNT = 5  # intervals between ticks, about


@dataclass(frozen=True)
class Axis:
    """A part of the real line with ticks.

    Attributes
    ----------
    low, high : float
        The ends; low < high.
    ticks : tuple of float
        Within the ends.
    labels : tuple of str
        One per tick.
    log : bool
        Whether equal factors take equal space.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a number lies, from 0 at the lower end to 1 at the upper."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, _LEAST)) - low) / (high - low)
        return (min(max(value, -_MOST), _MOST) - self.low) / (self.high - self.low)


def linear_axis(values: Iterable[float], *, rounded: bool = False) -> Axis:
    """Return an axis that shows numbers with equal spaces between equal differences.

    Parameters
    ----------
    values : iterable of float
        Finite numbers to show; none gives the interval from 0 to 1.
    rounded : bool
        Whether to end at ticks, and begin at zero if that is near; otherwise at the numbers themselves.
    """
    low, high = _ends(values)
    if rounded:
        if 0 < low < 0.3 * high:
            low = 0.0
        if 0.3 * low < high < 0:
            high = 0.0
        multiple, exponent = _step(low, high, _COUNT)
        first = math.floor(_in_steps(low, multiple, exponent) + 1e-9)
        last = math.ceil(_in_steps(high, multiple, exponent) - 1e-9)
        low, high = _tick(first, multiple, exponent), _tick(last, multiple, exponent)
    ticks, step = nice_ticks(low, high)
    return Axis(low, high, tuple(ticks), tuple(tick_labels(ticks, step)))


def log_axis(values: Iterable[float]) -> Axis:
    """Return an axis that shows positive numbers with equal spaces between equal factors."""
    found = [math.log10(min(max(value, _LEAST), 1 / _LEAST)) for value in values if value > 0]
    low, high = (min(found), max(found)) if found else (-1.0, 0.0)
    margin = 0.03 * (high - low) if high - low > 1e-9 else 0.3
    low, high = 10 ** (low - margin), 10 ** (high + margin)
    ticks = log_ticks(low, high)
    return Axis(low, high, tuple(ticks), tuple(_log_labels(ticks)), log=True)


def nice_ticks(low: float, high: float, count: int = _COUNT) -> tuple[list[float], float]:
    """Return multiples of 1, 2 or 5 times a power of ten within an interval, and the step between them.

    Parameters
    ----------
    low, high : float
        The interval; low < high.
    count : int
        About how many steps it is divided into, and no more than these.

    Examples
    --------
    >>> nice_ticks(0.0, 1.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 0.2)
    """
    multiple, exponent = _step(low, high, count)
    first = math.ceil(_in_steps(low, multiple, exponent) - 1e-9)
    last = math.floor(_in_steps(high, multiple, exponent) + 1e-9)
    return [_tick(k, multiple, exponent) for k in range(first, last + 1)], _tick(1, multiple, exponent)


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within an interval; where these are few, also their multiples by 2 and 5."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        stride = -(-(last - first) // 6)
        return [_tick(1, 1, k) for k in range(first, last + 1) if k % stride == 0]
    found = [_tick(1, m, k) for k in range(first - 1, last + 1) for m in (1, 2, 5)]
    within = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return within if len(within) >= 3 else [value for value in nice_ticks(low, high)[0] if value > 0]


def tick_labels(ticks: list[float], step: float) -> list[str]:
    """Return labels with as many digits as tell the ticks apart, and the same number of them for all."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    finest = math.floor(math.log10(step) + 1e-9)
    if largest < 1e6 and finest >= -4:
        return [fixed(tick, max(0, -finest)) for tick in ticks]
    digits = max(0, math.floor(math.log10(largest) + 1e-9) - finest) if largest else 0
    return ["0" if tick == 0 else scientific(tick, digits) for tick in ticks]


def _log_labels(ticks: list[float]) -> list[str]:
    exponents = [math.floor(math.log10(tick) + 1e-9) for tick in ticks]
    if all(-3 <= exponent <= 4 for exponent in exponents):
        return [fixed(tick, len(f"{tick:.9f}".rstrip("0").partition(".")[2])) for tick in ticks]
    powers = [math.isclose(tick, 10.0**exponent) for tick, exponent in zip(ticks, exponents, strict=True)]
    if all(powers):
        return [power(exponent) for exponent in exponents]
    digits = max(len(f"{tick:.6e}".partition("e")[0].rstrip("0").partition(".")[2]) for tick in ticks)
    return [scientific(tick, digits) for tick in ticks]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest number, apart from each other."""
    found = [min(max(value, -_MOST), _MOST) for value in values]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-290):
        margin = 0.1 * size if size > 1e-280 else 0.5
        low, high = low - margin, high + margin
    return low, high


def _step(low: float, high: float, count: int) -> tuple[int, int]:
    """The step between ticks, as a multiple (1, 2 or 5) and an exponent of ten."""
    least = (high - low) / count
    exponent = math.floor(math.log10(least))
    for multiple in (1, 2, 5):
        if _tick(1, multiple, exponent) >= least * (1 - 1e-9):
            return multiple, exponent
    return 1, exponent + 1


def _tick(k: int, multiple: int, exponent: int) -> float:
    """The multiple of a step, rounded once: 0.3 is 3 / 10, not 3 · 0.1."""
    return float(k * multiple * 10**exponent) if exponent >= 0 else k * multiple / 10**-exponent


def _in_steps(value: float, multiple: int, exponent: int) -> float:
    return value / _tick(1, multiple, exponent)
