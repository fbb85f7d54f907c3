"""Clocks, seeds, and a record of where a run took place."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import time
from collections.abc import Iterator
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
    """Return the commit of a checkout, marked where files differ from it; elsewhere what ``NULLBAYES_COMMIT`` says."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return os.environ.get("NULLBAYES_COMMIT")


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
