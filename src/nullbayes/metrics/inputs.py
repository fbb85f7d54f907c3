"""Reading the arguments of metrics: tensors, arrays and lists become tensors on the CPU, and shapes are compared."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ArrayLike: TypeAlias = Tensor | npt.ArrayLike

_TORCH_FLOATS = (2, 4, 8)  # bytes; torch has no extended precision


def as_tensor(values: ArrayLike, name: str) -> Tensor:
    """Return the values as a tensor on the CPU, in their own precision; numbers of a list are float64 or int64."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, (list, tuple)) and any(isinstance(value, Tensor) for value in values):
        parts = [as_tensor(value, name) for value in values]
        if len({part.shape for part in parts}) > 1:
            message = f"{name} is a list of tensors of several shapes; join batches with torch.cat."
            raise ValueError(message)
        return torch.stack(parts)
    if np.ma.is_masked(values):
        message = f"{name} is a masked array, and its mask would be lost; pass only the entries that count."
        raise ValueError(message)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"{name} is no array of numbers: {error}; pass a tensor, an array or a list with rows of one length."
        raise ValueError(message) from error
    if array.dtype.kind not in "biuf":
        message = f"{name} must hold real numbers, but it is {type(values).__name__} with entries of {array.dtype}."
        raise ValueError(message)
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind == "f" and dtype.itemsize not in _TORCH_FLOATS:
        dtype = np.dtype(np.float64)
    # from_numpy puts the tensor on the CPU whatever the default device is; it warns of arrays that are read-only.
    return torch.from_numpy(np.require(array, dtype, ["C", "W"]))


def as_numbers(values: ArrayLike, name: str, what: str = "value") -> Tensor:
    """Return finite numbers in float64; ``what`` is the word for one of them in messages."""
    numbers = as_tensor(values, name)
    if numbers.is_complex():
        message = f"{name} must hold real numbers, but it is {numbers.dtype}."
        raise ValueError(message)
    if numbers.numel() == 0:
        message = f"{name} is empty; pass at least one {what}."
        raise ValueError(message)
    numbers = numbers.double()
    if not numbers.isfinite().all():
        message = f"{name} has NaN or infinite entries; find out where they come from, or drop those inputs."
        raise ValueError(message)
    return numbers


def as_scores(values: ArrayLike, name: str, what: str = "score") -> Tensor:
    """Return one number for each input, as float64 of shape (N,)."""
    numbers = as_numbers(values, name, what)
    shape = tuple(numbers.shape)
    if not shape or not same_entries(shape[:1], shape):
        message = f"{name} must have shape (N,), a {what} for each input, but it has shape {shape}."
        raise ValueError(message)
    return numbers.flatten()


def same_entries(wanted: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether two shapes are the same, up to dimensions of size one after the first: (N,) and (N, 1) are."""
    return wanted[:1] == given[:1] and [d for d in wanted[1:] if d != 1] == [d for d in given[1:] if d != 1]
