"""How much memory there is: free on a device, or for this process on the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, or for the process on the host."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch holds it for us
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    candidates = [8 * 2**30]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        candidates = [int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024]
    with contextlib.suppress(OSError, ValueError):  # a container may allow less than the machine has
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        candidates.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(2**28, min(candidates))
