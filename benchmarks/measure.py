"""Clocks, memory, exponents, and a record of where a run took place."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nullbayes as nb


def synchronize(device: torch.device) -> None:
    """Wait for what was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Seconds that pass inside ``with clock:``, summed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self._start = device, 0.0, 0.0

    def __enter__(self) -> Clock:
        synchronize(self.device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        synchronize(self.device)
        self.seconds += time.perf_counter() - self._start


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


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let what draws from the global generator draw the same, and leave that generator as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def environment(device: torch.device, folder: Path) -> dict[str, Any]:
    """Return what a reader needs to know to compare the figures with others."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "nullbayes": nb.__version__,
        "commit": _commit(folder),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device_memory": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def _commit(folder: Path) -> str | None:
    """Return the commit of a checkout, marked where files differ from it."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
