"""The first examples of some data and the number of all, to plan a fit without reading everything."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from nullbayes.distributed import ALONE, Group
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.loaders import IN_ORDER, as_loader, batch_fn_for, check_order, numbered

_PLANNED_EXAMPLES = 8  # that a plan looks at, if as many batches hold so many
_PLANNED_BATCHES = 3  # and one more is read, to see whether these are all


class Beginning(NamedTuple):
    """The first examples of some data, and the number of all examples."""

    examples: Examples
    n_examples: int
    estimated: bool  # whether the number was estimated from the number of batches


class Expected(Examples):
    """Examples of which only the first can be read, to plan with: so many, spread over the processes of a group."""

    def __init__(self, beginning: Examples, n_examples: int, group: Group = ALONE) -> None:
        self.device, self._beginning, self.group = beginning.device, beginning, group
        self.columns, each = beginning.columns, -(-n_examples // group.size)
        self._edges = [min(n_examples, each * i) for i in range(group.size + 1)]

    def __len__(self) -> int:
        """Return the largest number of examples of a process."""
        return self.n_most

    def read(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Return some of the first examples."""
        return self._beginning.read(start, stop)


def read_beginning(data: Any, batch_fn: BatchFn | None, device: torch.device, dtype: torch.dtype) -> Beginning:
    """Read a few batches of a loader, and count its examples without reading the rest.

    A loader without a length is read to its end.
    """
    loader = as_loader(data)
    batch_fn = batch_fn_for(loader, batch_fn)
    check_order(loader, IN_ORDER)
    if _length(loader) is None:
        examples = Examples(loader, batch_fn, device, dtype=dtype)
        n_examples, estimated = len(examples), False
    else:
        batches, sizes, complete = _first_batches(loader, batch_fn, dtype)
        examples = Examples(batches, batch_fn, device, dtype=dtype)
        n_examples, estimated = (sum(sizes), False) if complete else _count(loader, batch_fn, dtype, sizes)
    return Beginning(examples.chosen(range(min(_PLANNED_EXAMPLES, len(examples)))), n_examples, estimated)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):  # a DataLoader of a stream
        return None


def _first_batches(
    loader: Iterable[Any], batch_fn: BatchFn | None, dtype: torch.dtype
) -> tuple[list[Any], list[int], bool]:
    """Return the first batches, their sizes, and whether these are all batches."""
    batches: list[Any] = []
    sizes: list[int] = []
    with torch.random.fork_rng(devices=()):  # a DataLoader draws a seed; samples must not depend on plans
        iterator = iter(loader)
    for i, batch in enumerate(iterator):
        if i == _PLANNED_BATCHES or sum(sizes) >= _PLANNED_EXAMPLES:
            return batches, sizes, False
        batches.append(batch)
        sizes.append(len(numbered(i, batch, batch_fn, dtype)[1]))
    return batches, sizes, True


def _count(loader: Iterable[Any], batch_fn: BatchFn | None, dtype: torch.dtype, sizes: list[int]) -> tuple[int, bool]:
    """Return the number of examples of a loader whose first batches have these sizes, and whether it is estimated."""
    if isinstance(loader, list):
        rest = enumerate(loader[len(sizes) :], len(sizes))
        return sum(sizes) + sum(len(numbered(i, batch, batch_fn, dtype)[1]) for i, batch in rest), False
    if isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler:
        total, size = _length(loader.sampler), loader.batch_sampler.batch_size
        if not isinstance(loader.dataset, IterableDataset) and total is not None and set(sizes) == {size}:
            return total, False
    n_batches = _length(loader)
    assert n_batches is not None
    return round(n_batches * sum(sizes) / len(sizes)), True
