"""Reading the arguments of metrics: arrays become checked tensors on the CPU, and probabilities meet their labels."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = Tensor | npt.ArrayLike

_TORCH_FLOATS = (2, 4, 8)  # bytes; torch has no extended precision
_RANGE_TOLERANCE = 1e-4
_SUM_TOLERANCE = 1e-3


def as_tensor(values: Array, name: str) -> Tensor:
    """Return the values as a tensor on the CPU, in their own precision; lists become float64 or int64."""
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
        message = (
            f"{name} is not an array of numbers: {error}; pass a tensor, an array or a list with rows of one length."
        )
        raise ValueError(message) from error
    if array.dtype.kind not in "biuf":
        message = f"{name} must hold real numbers, but it is {type(values).__name__} with entries of {array.dtype}."
        raise ValueError(message)
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind == "f" and dtype.itemsize not in _TORCH_FLOATS:
        dtype = np.dtype(np.float64)
    # from_numpy ignores the default device; it would warn of read-only arrays.
    return torch.from_numpy(np.require(array, dtype, ["C", "W"]))


def as_numbers(values: Array, name: str, what: str = "value") -> Tensor:
    """Return finite numbers in float64; ``what`` names one of them in messages."""
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


def as_scores(values: Array, name: str, what: str = "score") -> Tensor:
    """Return one number for each input, as float64 of shape (N,)."""
    numbers = as_numbers(values, name, what)
    shape = tuple(numbers.shape)
    if not shape or not same_entries(shape[:1], shape):
        message = f"{name} must have shape (N,), a {what} for each input, but it has shape {shape}."
        raise ValueError(message)
    return numbers.flatten()


def same_entries(wanted: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Return whether two shapes agree up to dimensions of size one after the first, as (N,) and (N, 1) do."""
    return wanted[:1] == given[:1] and [d for d in wanted[1:] if d != 1] == [d for d in given[1:] if d != 1]


class Labelled(NamedTuple):
    """The M positions of all examples that are scored."""

    probs: Tensor  # (M, C) in float64; C = 2 for binary labels and with multilabel=True
    predicted: Tensor  # (M,)
    labels: Tensor  # (M,)
    floor: float  # smallest normal number of the dtype in which the probabilities were given


def read(probs: Array, targets: Array | None, class_dim: int | None, ignore_index: int, multilabel: bool) -> Labelled:
    """Return the positions that are scored; without targets these are all positions, with label 0."""
    values = _floating(probs)
    given = None if targets is None else as_tensor(targets, "targets")
    if multilabel and class_dim is not None:
        message = f"With multilabel=True no dimension holds classes; leave class_dim={class_dim} out."
        raise ValueError(message)
    if values.ndim == 1 and class_dim is not None:
        message = f"probs of shape {tuple(values.shape)} has no dimension of classes; leave class_dim={class_dim} out."
        raise ValueError(message)
    single = multilabel or values.ndim == 1 or values.shape[1:] == (1,)
    if single:
        if given is not None:
            _check_single(values.shape, given.shape)
        rows, dim = values.reshape(-1, 1), None
    else:
        dim = _class_dimension(tuple(values.shape), None if given is None else tuple(given.shape), class_dim)
        rows = values.movedim(dim, -1).reshape(-1, values.shape[dim])
    labels = torch.zeros(len(rows), dtype=torch.long, device="cpu")
    if given is not None:
        labels = _labels(given.flatten(), max(2, rows.shape[1]), ignore_index, single)
        counted = labels != ignore_index
        if not counted.any():
            message = f"All targets are ignore_index ({ignore_index}); there is nothing to score."
            raise ValueError(message)
        if not counted.all():
            rows, labels = rows[counted], labels[counted]
    table = _probabilities(rows, dim)
    predicted = (table[:, 1] >= 0.5).long() if single else table.argmax(dim=1)
    return Labelled(table, predicted, labels, torch.finfo(values.dtype).tiny)


def _floating(probs: Array) -> Tensor:
    values = as_tensor(probs, "probs")
    if values.ndim == 0:
        message = "probs must have shape (N, C), or (N,) for binary labels, but it is a single number."
        raise ValueError(message)
    if values.numel() == 0:
        message = f"probs is empty (shape {tuple(values.shape)}); pass at least one example."
        raise ValueError(message)
    if not values.is_floating_point():
        message = f"probs must be floating point, but it is {values.dtype}; pass probabilities, not classes."
        raise ValueError(message)
    return values


def _check_single(shape: tuple[int, ...], given: tuple[int, ...]) -> None:
    """Refuse targets unless there is one label per probability."""
    if same_entries(shape, given):
        return
    wanted = shape[:1] if shape[1:] == (1,) else tuple(shape)
    message = f"targets must have shape {wanted}, a label for each probability, but they have shape {tuple(given)}"
    if given and same_entries(shape[1:], given):
        message += "; if the first dimension of probs holds samples, average over the samples first: probs.mean(0)"
    raise ValueError(message + ".")


def _class_dimension(shape: tuple[int, ...], given: tuple[int, ...] | None, class_dim: int | None) -> int:
    """Return the dimension of the classes, counted from the end; refuse targets whose shape does not fit."""
    ndim = len(shape)
    options = [-1] if ndim == 2 else [1 - ndim, -1]
    if class_dim is not None:
        dim = class_dim - ndim if class_dim >= 0 else class_dim
        if not 1 - ndim <= dim <= -1:
            message = f"class_dim={class_dim} cannot hold the classes of probs of shape {shape}; 0 is the examples."
            raise ValueError(message)
        options = [dim]
    if given is None:
        fitting = options
        if len(options) > 1:
            message = (
                f"Of probs of shape {shape}, dimension 1 or the last may hold the classes; pass class_dim=1, "
                "class_dim=-1 or the targets; if the first dimension holds samples, average over the samples first: "
                "probs.mean(0)."
            )
            raise ValueError(message)
    else:
        fitting = [d for d in options if same_entries(_without(shape, d), given)]
    if not fitting:
        raise ValueError(_mismatch(shape, given or (), options))
    if all(shape[d] == 1 for d in fitting):
        message = (
            f"probs of shape {shape} hold a single probability for each target; pass multilabel=True if it is that "
            "of label 1; turn one-hot targets into classes with argmax."
        )
        raise ValueError(message)
    if len(fitting) > 1:
        message = (
            f"Of probs of shape {shape} with targets of shape {given}, dimension 1 or the last may hold the classes; "
            "pass class_dim=1 or class_dim=-1."
        )
        raise ValueError(message)
    return fitting[0]


def _mismatch(shape: tuple[int, ...], given: tuple[int, ...], options: list[int]) -> str:
    wanted = " or ".join(str(_without(shape, d)) for d in options)
    message = f"targets must have shape {wanted} for probs of shape {shape}, but they have shape {given}"
    if same_entries(shape, given):
        message += (
            "; turn one-hot targets into classes with argmax over the classes, or pass multilabel=True if each entry "
            "is a label of its own, 0 or 1"
        )
    elif len(shape) > 2 or same_entries(shape[1:], given):
        message += "; if the first dimension of probs holds samples, average over the samples first: probs.mean(0)"
    return message + "."


def _labels(targets: Tensor, n_classes: int, ignore_index: int, single: bool) -> Tensor:
    """Return checked labels (M,) as int64; ignored ones keep their value."""
    if not hasattr(ignore_index, "__index__"):
        message = f"ignore_index must be a whole number, but it is {ignore_index!r}."
        raise ValueError(message)
    if targets.is_floating_point() and single:  # as binary cross entropy takes them
        if not ((targets == 0) | (targets == 1) | (targets == ignore_index)).all():
            message = f"targets must be 0, 1 or ignore_index ({ignore_index}), but some are other numbers or NaN."
            raise ValueError(message)
    elif targets.is_floating_point() or targets.is_complex():
        message = (
            f"targets must be integer classes, but they are {targets.dtype}; convert them with .long(), "
            "or .astype(int) in NumPy."
        )
        raise ValueError(message)
    labels = targets.long()
    counted = labels[labels != ignore_index]
    low, high = (int(counted.min()), int(counted.max())) if len(counted) else (0, 0)
    if low < 0 or high >= n_classes:
        message = (
            f"targets must lie between 0 and {n_classes - 1}, but they run from {low} to {high}; number the classes "
            f"from 0, and pass as ignore_index the label of what is to be left out (now {ignore_index})."
        )
        raise ValueError(message)
    return labels


def _probabilities(rows: Tensor, dim: int | None) -> Tensor:
    """Return checked probabilities (M, C) in float64; a single column p becomes (1 - p, p)."""
    table = rows.double()
    if not table.isfinite().all():
        message = "probs has NaN or infinite entries; find out where the model produces them."
        raise ValueError(message)
    low, high = float(table.min()), float(table.max())
    if low < -_RANGE_TOLERANCE or high > 1 + _RANGE_TOLERANCE:
        message = (
            f"probs must lie between 0 and 1, but its entries run from {low:.5g} to {high:.5g}; "
            f"if these are logits, pass their {'sigmoid' if dim is None else 'softmax'}."
        )
        raise ValueError(message)
    table = table.clamp(0, 1)
    if dim is None:
        p = table.flatten()
        return torch.stack([1 - p, p], dim=1)
    total = table.sum(dim=1)
    worst = float(total[(total - 1).abs().argmax()])
    if abs(worst - 1) > _SUM_TOLERANCE:
        message = (
            f"probs must sum to 1 over dimension {dim}, but somewhere it sums to {worst:.5g}; if these are logits, "
            "pass their softmax (in float32 or better); if these are independent labels, pass multilabel=True."
        )
        raise ValueError(message)
    return table


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[dim]
    return tuple(sizes)
