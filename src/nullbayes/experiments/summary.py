"""Means over seeds or splits, in figures and in words."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import nullbayes as nb
from nullbayes.page import Value


def mean(numbers: Sequence[float]) -> float:
    """Return the mean."""
    return statistics.fmean(numbers)


def spread(numbers: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None of a single number."""
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def value(numbers: Sequence[float], paper: float | None = None) -> Value | None:
    """Return mean and spread of a number per seed or split as a cell of a table; None without numbers."""
    return Value(mean(numbers), spread(numbers), paper) if numbers else None


def row(name: str, runs: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str | Value | None]:
    """Return a line of a table, from one mapping per seed or split.

    A key that the first does not have, or whose figure is None there, leaves its place empty.
    """
    return [name, *(None if runs[0].get(key) is None else value([run[key] for run in runs]) for key in keys)]


def brief(numbers: Sequence[float], digits: int = 3) -> str:
    """Return the mean, with the spread where there is one, for a sentence.

    Examples
    --------
    >>> brief([1.0, 2.0], 1), brief([0.25])
    ('1.5 ± 0.7', '0.250')
    """
    deviation = spread(numbers)
    tail = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{mean(numbers):.{digits}f}{tail}"


def times(n: int, of: int) -> str:
    """Return how often something happened, for a sentence.

    Examples
    --------
    >>> times(3, 3), times(1, 3), times(0, 2)
    ('in all 3 seeds', 'in 1 of 3 seeds', 'in none of 2 seeds')
    """
    if of == 1:
        return "in the only one of the seeds" if n else "not in the only one of the seeds"
    return f"in all {of} seeds" if n == of else f"in {n or 'none'} of {of} seeds"


@contextlib.contextmanager
def as_asked() -> Iterator[None]:
    """Do not warn of what an experiment does on purpose: samples of a given size, or few sweeps."""
    with warnings.catch_warnings():
        for kind in (nb.errors.UnderfitWarning, nb.errors.CollapseWarning, nb.errors.ConvergenceWarning):
            warnings.simplefilter("ignore", kind)
        yield
