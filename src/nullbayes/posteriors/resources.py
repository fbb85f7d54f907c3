"""What the machine has: free memory, peak memory, elapsed time by phase."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nullbayes.errors import SettingsError
from nullbayes.memory import free_memory

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_limit_bytes(limit: int | str | None, device: torch.device) -> int:
    """Return a limit in bytes: a number, a string such as "8GB", or a share of what is free now."""
    if limit is None:
        return int((0.85 if device.type == "cuda" else 0.6) * free_memory(device))
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]?)(i?B)?\s*", limit, flags=re.IGNORECASE)
        if match is None:
            msg = f'memory_limit={limit!r} is not a size: write bytes as a number, or a string such as "8GB".'
            raise SettingsError(msg)
        limit = int(float(match[1]) * _UNITS[match[2].upper()])
    if not 0 < limit < math.inf:
        msg = f"memory_limit must be positive and finite, a number of bytes, not {limit}."
        raise SettingsError(msg)
    return int(limit)


def host_memory_bytes(device: torch.device) -> int:
    """Return half of the free host memory, where it is another than the device's own; else 0."""
    return 0 if device.type == "cpu" else free_memory(torch.device("cpu")) // 2


class Meter:
    """Seconds by phase, and the peak of memory since it was made, beyond what there was then.

    On CUDA that is what PyTorch allocated; on a CPU it is the resident memory of the process, where the system tells
    it. ``announce`` is called with the name of each phase as it begins.
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
        """Add the time of a block to a phase."""
        if self.announce is not None:
            self.announce(name)
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def peak(self) -> int | None:
        """Return the peak in bytes, or None where the system does not tell."""
        now = self._now()
        return None if now is None or self._before is None else max(0, now - self._before)

    def _now(self) -> int | None:
        """Return the high-water mark."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        return None
