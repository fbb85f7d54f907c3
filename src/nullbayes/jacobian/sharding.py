"""Training data and inputs that are spread over processes: which part each of them reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from nullbayes.distributed import Group
from nullbayes.errors import DataError
from nullbayes.jacobian.batches import as_tensors, is_array, n_examples
from nullbayes.jacobian.loaders import IN_ORDER, Given, as_loader, check_order, remade, sampler_of


def own_part(data: Any, group: Group) -> Iterable[Any]:
    """Return a loader of the examples of this process, given all data or a loader that has divided them already."""
    loader = as_loader(data)
    if isinstance(loader, DataLoader) and isinstance(sampler_of(loader), DistributedSampler):
        return remade(loader, Subset(loader.dataset, _divided(sampler_of(loader), len(loader.dataset), group)))  # type: ignore[arg-type]
    check_order(loader, IN_ORDER)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        if loader.batch_sampler is not None and not isinstance(loader.batch_sampler, BatchSampler):
            return DataLoader(
                loader.dataset, batch_sampler=_cut(list(loader.batch_sampler), group), collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
            )  # fmt: skip
        return remade(loader, Subset(loader.dataset, _cut(list(sampler_of(loader)), group)))
    if isinstance(loader, Sequence):
        own = [_share(batch, group) for batch in loader] if len(loader) < group.size else _cut(loader, group)
        return Given(own) if isinstance(loader, Given) else own
    return _EveryNth(loader, group.rank, group.size)


def _share(batch: Any, group: Group) -> Any:
    """Return consecutive examples of a batch for this process."""
    n = n_examples(as_tensors(batch, None))
    _check_enough(n, group.size, "examples")
    return _slice(batch, *(n * i // group.size for i in (group.rank, group.rank + 1)))


def _slice(x: Any, start: int, stop: int) -> Any:
    """Return some examples of tensors or arrays; arrays stay arrays, which take their type from the network later."""
    if is_array(x):
        return getattr(x, "iloc", x)[start:stop] if x.ndim else x
    if isinstance(x, Mapping):
        return {key: _slice(value, start, stop) for key, value in x.items()}
    return tuple(_slice(part, start, stop) for part in x) if isinstance(x, (tuple, list)) else x


def _cut(items: Sequence[Any], group: Group) -> list[Any]:
    """Return consecutive items for this process, about as many as for every other."""
    _check_enough(len(items), group.size, "batches or examples")
    start, stop = (len(items) * i // group.size for i in (group.rank, group.rank + 1))
    return list(items[start:stop])


def _check_enough(n: int, n_processes: int, what: str) -> None:
    if n < n_processes:
        msg = f"There are {n} {what} for {n_processes} processes: start fewer processes."
        raise DataError(msg)


def _divided(sampler: Any, n: int, group: Group) -> list[int]:
    """Return the examples that a DistributedSampler gives to this process, if each goes to exactly one process."""
    instead = 'Pass the loader without a DistributedSampler: parallel="data" gives each process its part.'
    if sampler.shuffle:
        msg = f"The DistributedSampler of the loader shuffles: a fit reads the data several times, in order. {instead}"
        raise DataError(msg)
    if (sampler.num_replicas, sampler.rank) != (group.size, group.rank):
        msg = (
            f"The DistributedSampler of the loader is that of process {sampler.rank} of {sampler.num_replicas}; this "
            f"is process {group.rank} of {group.size}. {instead}"
        )
        raise DataError(msg)
    if n % group.size:
        does = "leaves out some examples" if sampler.drop_last else "repeats examples, so that all parts are as long"
        msg = (
            f"The DistributedSampler of the loader {does}: {n:,} examples cannot be divided by {group.size}. A "
            f"repeated example would count twice. {instead}"
        )
        raise DataError(msg)
    return list(sampler)


class _EveryNth:
    """Every n-th batch of a stream, which each process reads as a whole."""

    def __init__(self, loader: Iterable[Any], rank: int, n: int) -> None:
        self._loader, self._rank, self._n = loader, rank, n

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._loader, self._rank, None, self._n)


def own_inputs(x: Any, group: Group) -> tuple[Any, bool]:
    """Return the inputs that this process predicts, and whether the processes take turns at them.

    Without turns, each process has consecutive inputs.
    """
    if is_array(x) or isinstance(x, (tuple, Mapping)):
        return _share(x, group), False
    part = own_part(x, group)
    if isinstance(part, _EveryNth):
        msg = 'parallel="data" needs inputs that can be counted: pass a tensor, a list of batches, or a DataLoader.'
        raise DataError(msg)
    return part, isinstance(x, DataLoader) and isinstance(sampler_of(x), DistributedSampler)


def in_order(group: Group, part: Tensor, dim: int, *, turns: bool) -> Tensor:
    """Return the answers for all inputs, given those of this process along ``dim``."""
    whole = group.join(part, dim)
    if not turns:
        return whole
    ordered: Tensor = whole.unflatten(dim, (group.size, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return ordered
