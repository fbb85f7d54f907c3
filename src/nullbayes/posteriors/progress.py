"""What a fit shows and measures while it works: the phase, sweeps and residual, seconds, and the peak of memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from nullbayes.distributed import Group

_PHASES = {
    "data": "reading the data",
    "rows": "forming rows",
    "factors": "factoring",
    "projection": "projecting",
    "measure": "measuring",
}
_LONGEST = 1e7  # seconds, a few months: a longer estimate says nothing


class Progress:
    """One line on a terminal, shown during a ``with`` block and wiped at its end.

    It is written to ``file``, by default the standard error, if ``show`` is true and the file is a terminal.
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
        """Show the phase that begins."""
        self._say(_PHASES.get(name, name))

    def sweeps(self, tolerance: float) -> Callable[[int, Tensor], None]:
        """Return the callback of a projection that starts now."""
        start, first, seen = self._clock(), 0, list[tuple[int, float]]()

        def show(sweeps: int, residual: Tensor) -> None:
            nonlocal start, first
            if not seen and sweeps > 1:  # the projection was resumed
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
    """Return how many more sweeps are needed at the rate of the later half; None where the residual does not fall.

    ``seen`` holds the sweeps and the residual of each measurement, in order.
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
    """Return a time with a fitting unit."""
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if seconds < 99.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


class Meter:
    """Seconds per phase, and the peak of memory beyond what was in use when the meter was made.

    On CUDA the memory is what PyTorch allocated; on a CPU it is the resident memory of the process, where the system
    reports it. ``announce`` is called with the name of each phase when it begins.
    """

    def __init__(self, device: torch.device, announce: Callable[[str], None] | None = None) -> None:
        self.device, self.announce = device, announce
        self.seconds: dict[str, float] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark on Linux
        self._before = self._now()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a ``with`` block to a phase."""
        if self.announce is not None:
            self.announce(name)
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def peak(self) -> int | None:
        """Return the peak in bytes, or None where the system does not report it."""
        now = self._now()
        return None if now is None or self._before is None else max(0, now - self._before)

    def slowest(self, group: Group) -> tuple[dict[str, float], int | None]:
        """Return the seconds per phase and the peak of memory, each of the process that needed most."""
        every = group.gather((self.seconds, self.peak()))
        seconds = {name: max(seconds.get(name, 0.0) for seconds, _ in every) for name in self.seconds}
        return seconds, max((peak for _, peak in every if peak is not None), default=None)

    def _now(self) -> int | None:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        return None
