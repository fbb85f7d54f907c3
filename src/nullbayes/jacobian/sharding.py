"""Training data that are spread over processes: which part each of them reads, and how examples are numbered."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset
from torch.utils.data.distributed import DistributedSampler

from nullbayes.distributed import Group
from nullbayes.errors import DataError
from nullbayes.hashing import fingerprint
from nullbayes.jacobian.batches import BatchFn, as_tensors, is_array, n_examples
from nullbayes.jacobian.data import IN_ORDER, Examples
from nullbayes.jacobian.loaders import Given, as_loader, check_order, remade, sampler_of
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.shared import JointRows


class Shard(Examples):
    """The examples of this process, which reads and holds no others.

    Each process has some consecutive examples; a loader whose DistributedSampler has divided the examples already is
    taken as it is. Examples are numbered through all processes in order of rank.

    Parameters
    ----------
    data, batch_fn, device, dtype
        As for :class:`Examples`: all data, in every process, of which only a part is read; or a loader of its part.
    group : Group
        The processes.
    """

    def __init__(
        self, data: Any, batch_fn: BatchFn | None, device: torch.device, group: Group, *, dtype: torch.dtype
    ) -> None:
        super().__init__(own_part(data, group), batch_fn, device, dtype=dtype)
        self.group = group
        sizes = group.gather(len(self))
        self._edges = [0, *itertools.accumulate(sizes)]
        layouts = group.gather(repr(self._layout))
        if len(set(layouts)) > 1:
            msg = f"The processes have examples of different forms: {' and '.join(sorted(set(layouts)))}."
            raise DataError(msg)
        self._fingerprint = fingerprint([("checksums", group.join(self._sums))], repr(self._layout))

    @property
    def n_all(self) -> int:
        """The number of examples of all processes."""
        return self._edges[-1]

    @property
    def n_most(self) -> int:
        """The largest number of examples that a process has."""
        return max(b - a for a, b in itertools.pairwise(self._edges))

    def parts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return which of some examples, by their ascending numbers among all, each process has, by its own numbers."""
        ends = [bisect_left(numbers, edge) for edge in self._edges]
        return [
            [number - self._edges[i] for number in numbers[a:b]] for i, (a, b) in enumerate(itertools.pairwise(ends))
        ]

    def joined(self, rows: Rows) -> Rows:
        """Return the rows of all processes as one matrix."""
        return JointRows(rows, self.group)

    def fingerprint(self) -> str:
        """Return a hash of the data of all processes: that of the same data in one process."""
        return self._fingerprint


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
