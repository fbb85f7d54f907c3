"""What a fit says while it works: the phase, then sweeps, residual, and about how long it will take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from torch import Tensor
from tqdm import tqdm

_PHASES = {
    "data": "reading the data",
    "rows": "forming rows",
    "factors": "factoring",
    "projection": "projecting",
    "measure": "measuring",
}
_LONGEST = 1e7  # seconds, some months: beyond, an estimate says nothing


class Progress:
    """One line on a terminal for the time of a ``with`` block, gone after it.

    Parameters
    ----------
    show : bool
        Whether to write at all; even then only on a terminal.
    file : text stream, optional
        Where to write; default the standard error.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, *, show: bool, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.text = ""
        self._show, self._file, self._clock = show, file, clock
        self._bar: Any = None

    def __enter__(self) -> Self:
        hidden = None if self._show else True  # None: hidden unless it is a terminal
        self._bar = tqdm(bar_format="{desc} [{elapsed}]", file=self._file, disable=hidden, leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._bar = None

    def phase(self, name: str) -> None:
        """Say what is being done now."""
        self._say(_PHASES.get(name, name))

    def sweeps(self, tolerance: float) -> Callable[[int, Tensor], None]:
        """Return a projector's callback, for a projection that starts now."""
        start, first, seen = self._clock(), 0, list[tuple[int, float]]()

        def show(sweeps: int, residual: Tensor) -> None:
            nonlocal start, first
            if not seen and sweeps > 1:  # it goes on where an earlier one was
                start, first = self._clock(), sweeps
            worst = float(residual.max())
            seen.append((sweeps, worst))
            left = sweeps_left(seen, tolerance)
            end = ""
            if left is not None and left * (each := (self._clock() - start) / (sweeps - first)) < _LONGEST:
                end = f", about {duration(left * each)} left"
            self._say(f"projecting: sweep {sweeps}, residual {worst:.1e}, tolerance {tolerance:.0e}{end}")

        return show

    def _say(self, text: str) -> None:
        self.text = text
        if self._bar is not None:
            self._bar.set_description_str(text)


def sweeps_left(seen: list[tuple[int, float]], tolerance: float) -> float | None:
    """Return how many more sweeps the residual needs at the rate of the later half of them; None if none is seen.

    ``seen`` holds sweeps and residual of each measurement, in order.
    """
    if len(seen) < 2 or min(seen[-1][1], tolerance) <= 0.0:
        return None
    sweeps, residual = seen[-1]
    if residual <= tolerance:
        return 0.0
    earlier = [point for point in seen[:-1] if 2 * point[0] <= sweeps] or seen[:1]
    before, larger = earlier[-1]
    if sweeps <= before or residual >= larger:
        return None
    return math.log(residual / tolerance) / (math.log(larger / residual) / (sweeps - before))


def duration(seconds: float) -> str:
    """Return a time in the unit that one would say it in."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if seconds < 99.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
