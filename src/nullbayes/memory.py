"""Whether an error means that there is no more memory, and giving back what can be given back."""

from __future__ import annotations

import gc

import torch

_SENTENCES = (  # of errors that torch raises as a plain RuntimeError
    "can't allocate memory",  # the allocator for CPUs
    "not enough memory",  # the same, on Windows
    "out of memory",
    "std::bad_alloc",
    "STATUS_ALLOC_FAILED",  # cuBLAS, cuSOLVER
)


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
