"""Memory: how much is free, whether an error means that there is none, and giving back what can be given back."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
_SENTENCES = (  # of errors that torch raises as a plain RuntimeError
    "can't allocate memory",  # the allocator for CPUs
    "not enough memory",  # the same, on Windows
    "out of memory",
    "std::bad_alloc",
    "STATUS_ALLOC_FAILED",  # cuBLAS, cuSOLVER
)


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in _SENTENCES)


def give_back() -> None:
    """Free what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class OutOfMemory:
    """The outcome of an attempt for which there was too little memory."""

    error: BaseException


def attempt(work: Callable[[], T]) -> T | OutOfMemory:
    """Return what ``work`` returns; where memory runs out, free all that it held and return the error."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error.with_traceback(None)  # its frames hold what is to be freed
        failure.__context__ = None
    give_back()
    return OutOfMemory(failure)
