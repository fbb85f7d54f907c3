"""Clocks, memory, exponents, and a record of where a run took place."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nullbayes.experiments.measuring import Clock, synchronize


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        with Clock(device) as clock:
            call()
        times.append(clock.seconds)
    return statistics.median(times)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread for the time of a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds over log sizes: 1 is linear growth, 0 is none."""
    if len(set(sizes)) < 2 or min(*sizes, *seconds) <= 0:
        msg = f"An exponent needs two different sizes and positive times, not {list(sizes)} and {list(seconds)}."
        raise ValueError(msg)
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float)), 1)[0])


def resident_bytes(field: str = "VmRSS") -> int | None:
    """Return the resident memory of this process, or its high-water mark ("VmHWM"); None where no one tells."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
    return None


class Peak:
    """Memory above what was taken at the start of ``with peak:``, in bytes; None where no one tells.

    On CUDA it is what PyTorch allocated. On a CPU it is resident memory and its high-water mark, which should be fresh:
    measure in a process of its own (``frame.in_fresh_process``).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            gc.collect()
            synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the earlier peak
            self._before = resident_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            top: int | None = torch.cuda.max_memory_allocated(self.device)
        else:
            top = resident_bytes("VmHWM")
        self.bytes = None if top is None or self._before is None else max(0, top - self._before)


def cuda_mib(peak: Peak) -> float | None:
    """Return a peak on CUDA; one on a CPU needs a process of its own, which the case ``memory`` gives it."""
    return peak.bytes / 2**20 if peak.device.type == "cuda" and peak.bytes is not None else None
