"""What users pass as data: a loader, arrays or a dataset; whether it can be read in order; how it is read again."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from nullbayes.errors import DataError
from nullbayes.jacobian.batches import BatchFn, as_tensors, is_array, leaves, split_batch

Batch = tuple[Any, Tensor]  # inputs and targets
RECIPE = "DataLoader(dataset, batch_size=..., shuffle=False)"
IN_ORDER = "A fit reads the data several times, and must find all examples in the same order"
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ASKED_TWICE = 3  # examples of a dataset, to see whether it augments
_BATCH = 256  # examples per batch of a dataset


class Given(list[Any]):
    """Inputs, or a pair with targets, that were passed without a loader: ``batch_fn`` is not applied to them."""

    without_batch_fn = True


def batch_fn_for(loader: Iterable[Any], batch_fn: BatchFn | None) -> BatchFn | None:
    """Return ``batch_fn``, which is applied to every batch of a loader; None for what was passed without one."""
    return None if getattr(loader, "without_batch_fn", False) else batch_fn


def as_loader(data: Any) -> Iterable[Any]:
    """Return an iterable of batches: a pair (inputs, targets) as one batch, those of a dataset, or the loader."""
    if isinstance(data, tuple) and len(data) == 2 and _is_data(data):
        return Given([data])
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        return DataLoader(data, batch_size=_BATCH)
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, list(data)[:4]))
        msg = (
            f"The training data must be batches, and a {type(data).__name__} with {names} is one batch: put it into a "
            "list, fit([batch]). It needs its targets, as 'labels'; or pass pairs, fit([(inputs, targets)])."
        )
        raise DataError(msg)
    if is_array(data) or isinstance(data, str) or not isinstance(data, Iterable):
        msg = (
            f"The training data must be batches (inputs, targets), not a {type(data).__name__}: "
            f"fit(x, y), {RECIPE}, or [(x, y)]."
        )
        raise DataError(msg)
    if isinstance(data, tuple) and len(data) == 2 and is_array(data[1]):
        what = "a loader, which brings its own targets: fit(loader)" if _is_loader(data[0]) else "no tensor or array"
        msg = f"Targets were passed beside a {type(data[0]).__name__}, which is {what}."
        raise DataError(msg)
    if isinstance(data, tuple):
        msg = (
            "The data are a tuple; inputs and targets are passed as (x, y), batches as a list of such pairs: [(x, y)]."
        )
        raise DataError(msg)
    return data


def numbered(i: int, batch: Any, batch_fn: BatchFn | None, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Split a batch into inputs and targets; an error names the batch."""
    try:
        return split_batch(batch, batch_fn, dtype)
    except DataError as error:
        msg = f"Batch {i}: {error}"
        raise DataError(msg) from None


def check_order(loader: Iterable[Any], purpose: str) -> None:
    """Refuse a DataLoader that does not read all examples in order, with all reasons at once."""
    if not isinstance(loader, DataLoader):
        return
    reasons = [reason for reason in (_randomness(loader), _losses(loader)) if reason]
    if not reasons:
        return
    augments = _augmentation(loader.dataset)
    more = f"; it also {augments}" if augments else ""
    repair = f"nb.evaluation_loader(loader) makes one that does {'neither' if len(reasons) > 1 else 'not'}"
    msg = f"The loader {' and '.join(reasons)}{more}. {purpose}: pass {_wanted(loader)}; {repair}."
    raise DataError(msg + (" Augmentation is for you to switch off in the dataset." if more else ""))


def batch_bytes(x: Any, y: Tensor) -> int:
    """Return the bytes of a batch."""
    return sum(leaf.numel() * leaf.element_size() for leaf in (*leaves(x), y))


class Stream:
    """The batches of a loader by number, read in order in one pass per sweep, with few of them in memory.

    To read an earlier batch that is no longer held begins a new pass. The first batch is always held, because the
    examples that the network is examined with lie there; of the others, at most ``held_bytes``.
    """

    def __init__(self, loader: Iterable[Any], n_batches: int, held_bytes: int) -> None:
        self._loader, self._n, self._held_bytes = loader, n_batches, held_bytes
        self._first: Batch | None = None
        self._window: deque[tuple[Batch, int]] = deque()  # with their bytes
        self._iterator: Iterator[Any] | None = None
        self._bytes = 0  # of the window
        self._next = 0  # the number of the batch that the iterator yields next
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the current pass: a copy begins its own."""
        return {key: getattr(self, key) for key in ("_loader", "_n", "_held_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin a new pass."""
        Stream.__init__(self, *state.values())

    def read(self, first: int, last: int, split: Callable[[int, Any], Batch]) -> list[Batch]:
        """Return batches ``first`` to ``last``, both included.

        ``split(number, batch)`` takes them apart, and refuses those that differ from the first time. No reference to it
        is kept, so that the owner of the stream and the workers of the current pass end with its last reference.
        """
        with self._lock:
            beginning = [] if first > 0 or self._first is None else [self._first]
            first += len(beginning)
            if first > last:
                return beginning
            if first < self._next - len(self._window):
                self._rewind()
            while self._next <= last:
                self._shrink(keep_from=first)
                self._advance(split)
            start = self._next - len(self._window)
            batches = [self._window[i - start][0] for i in range(first, last + 1)]
            self._shrink(keep_from=last)
            return beginning + batches

    def _rewind(self) -> None:
        self._iterator = None  # which ends its workers
        self._window.clear()
        self._bytes = self._next = 0

    def _shrink(self, keep_from: int) -> None:
        """Drop batches before a number while too much is held."""
        while self._window and self._next - len(self._window) < keep_from and self._bytes > self._held_bytes:
            self._bytes -= self._window.popleft()[1]

    def _advance(self, split: Callable[[int, Any], Batch]) -> None:
        number = self._next
        if self._iterator is None:
            with torch.random.fork_rng(devices=()):  # a DataLoader draws a seed; samples must not depend on passes
                self._iterator = iter(self._loader)
        try:
            batch = split(number, next(self._iterator))
        except StopIteration:
            self._rewind()
            msg = (
                "The loader can be read only once: pass a DataLoader, or list(loader)."
                if number == 0
                else f"The loader yields {number} batches now and yielded {self._n} at first: it must yield the same "
                "data whenever it is read."
            )
            raise DataError(msg) from None
        except BaseException:
            self._rewind()
            raise
        if number == 0:
            self._first = batch
        self._window.append((batch, batch_bytes(*batch)))
        self._bytes += self._window[-1][1]
        self._next = number + 1
        if self._next == self._n:  # these are all; asking once more ends its workers
            iterator, self._iterator = self._iterator, None
            if next(iterator, self) is not self:
                self._rewind()
                msg = (
                    f"The loader yields more than the {self._n} batches that it yielded at first: it must yield the "
                    "same data whenever it is read."
                )
                raise DataError(msg)


def evaluation_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same examples, each once and in order, as ``fit`` and ``predict`` need it.

    It has the dataset, the collate function, the batch size and the workers of the given loader, but neither shuffles
    nor drops the last batch. If the sampler of the loader takes only some of the examples, such as a
    ``SubsetRandomSampler`` or a list of indices, the new one takes the same ones.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        The loader for training. From Lightning: ``trainer.train_dataloader``, or ``datamodule.train_dataloader()``. The
        Hugging Face ``Trainer`` makes the right one itself: ``trainer.get_eval_dataloader(trainer.train_dataset)``.

    Returns
    -------
    torch.utils.data.DataLoader
        The loader for evaluation.

    Raises
    ------
    DataError
        If the dataset gives another example when it is asked twice: random augmentation can only be switched off where
        the dataset is made. Or if a custom sampler takes other examples each time.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> dataset = TensorDataset(torch.arange(5.0)[:, None], torch.zeros(5))
    >>> for_training = DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True)
    >>> [len(y) for x, y in evaluation_loader(for_training)]
    [2, 2, 1]
    """
    if not isinstance(loader, DataLoader):
        msg = f"evaluation_loader takes a DataLoader, not a {type(loader).__name__}: make one, {RECIPE}."
        raise DataError(msg)
    dataset = loader.dataset
    if reason := _augmentation(dataset):
        msg = f"The loader {reason}. Make the dataset once more with the transforms that you evaluate with."
        raise DataError(msg)
    chosen = _chosen(loader)
    return remade(loader, dataset if chosen is None else Subset(dataset, chosen))


def remade(loader: DataLoader[Any], dataset: Dataset[Any]) -> DataLoader[Any]:
    """Return a loader like another, which reads a dataset in order."""
    workers: dict[str, Any] = {"num_workers": loader.num_workers, "worker_init_fn": loader.worker_init_fn}
    if loader.num_workers:
        workers |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        workers |= {"multiprocessing_context": loader.multiprocessing_context, "timeout": loader.timeout}
    return DataLoader(
        dataset, batch_size=_batch_size(loader), collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, **workers
    )


def _is_loader(data: Any) -> bool:
    return isinstance(data, (DataLoader, Dataset)) or (
        isinstance(data, Iterable) and not isinstance(data, (list, tuple))
    )


def _is_data(pair: tuple[Any, Any]) -> bool:
    """Whether a pair is inputs and targets rather than two batches."""
    x, y = pair
    return is_array(y) and (is_array(x) or any(True for _ in leaves(as_tensors(x, None))))


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what chooses the examples of a loader; Accelerate wraps it once more."""
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    return getattr(batches, "sampler", loader.sampler)


def _wanted(loader: DataLoader[Any]) -> str:
    return RECIPE.replace(")", ", drop_last=False)") if _losses(loader) else RECIPE


def _randomness(loader: DataLoader[Any]) -> str:
    sampler = sampler_of(loader)
    if isinstance(sampler, _RANDOM) or (isinstance(sampler, DistributedSampler) and sampler.shuffle):
        return f"draws examples in random order ({type(sampler).__name__})"
    own_batches = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    if own_batches or not _is_known(sampler):  # a class that derives from BatchSampler may draw batches as it likes
        one, other = _read_twice(loader, own_batches)
        if one != other:
            named = loader.batch_sampler if own_batches else sampler
            return f"draws examples in random order ({type(named).__name__})"
    return ""


def _is_known(sampler: Any) -> bool:
    """Whether a sampler belongs to torch, or is a fixed sequence of indices."""
    return isinstance(sampler, (SequentialSampler, DistributedSampler, list, tuple, range)) or (
        type(sampler).__module__.startswith("torch.utils.data")
    )


def _read_twice(loader: DataLoader[Any], own_batches: bool) -> tuple[list[Any], list[Any]]:
    """Return the indices of two passes of the batch sampler, or of the sampler."""
    source: Any = loader.batch_sampler if own_batches else sampler_of(loader)
    with _random_numbers_kept(), contextlib.suppress(TypeError):  # a sampler without a length
        one, other = (list(itertools.islice(source, len(source))) for _ in range(2))
        return (
            ([i for batch in one for i in batch], [i for batch in other for i in batch])
            if own_batches
            else (one, other)
        )
    return [], []


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.batch_sampler, BatchSampler)


def _chosen(loader: DataLoader[Any]) -> list[int] | None:
    """Return the indices of the examples that a loader takes, in order; None for all of them."""
    sampler = sampler_of(loader)
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(sampler.indices)
    whole = isinstance(sampler, (RandomSampler, WeightedRandomSampler, SequentialSampler, DistributedSampler))
    if isinstance(loader.dataset, IterableDataset) or (whole and not _has_own_batches(loader)):
        return None
    one, other = (sorted(set(indices)) for indices in _read_twice(loader, _has_own_batches(loader)))
    if one != other:
        msg = (
            f"The sampler of the loader ({type(sampler).__name__}) takes other examples each time: make a loader of "
            f"those that the network was trained on, {RECIPE}."
        )
        raise DataError(msg)
    return one or None


def _losses(loader: DataLoader[Any]) -> str:
    batches, sampler = loader.batch_sampler, sampler_of(loader)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        return f"takes one part in {sampler.num_replicas} of the examples (DistributedSampler)"
    if (n := getattr(batches, "num_processes", 1)) > 1:
        return f"takes one part in {n} of the examples ({type(batches).__name__}, by accelerator.prepare)"
    if not getattr(batches, "drop_last", getattr(loader, "drop_last", False)):
        return ""
    try:
        left = len(sampler) % batches.batch_size  # type: ignore[union-attr]
    except (TypeError, AttributeError):
        return "drops its last few examples (drop_last=True)"  # a stream has no length
    return f"drops its last {left} examples (drop_last=True)" if left else ""


def _batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None or loader.batch_sampler is None:
        return loader.batch_size
    size = getattr(loader.batch_sampler, "batch_size", None)
    if size is None or not isinstance(loader.batch_sampler, BatchSampler):
        with torch.random.fork_rng(devices=()):
            size = len(next(iter(loader.batch_sampler)))
    return int(size)


def _augmentation(dataset: Any) -> str:
    """Say how a dataset differs between two reads. Empty if it does not, or cannot be read twice."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return ""
    with contextlib.suppress(Exception), _random_numbers_kept():  # errors show when the data are read
        for i in range(min(_ASKED_TWICE, len(dataset))):
            if not _equal(dataset[i], dataset[i]):
                transform = getattr(dataset, "transform", None)
                named = "" if transform is None else f", by its transform {type(transform).__name__}"
                return f"gives another example {i} each time (random augmentation{named})"
    return ""


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python: datasets and samplers may draw from any of them."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def _equal(a: Any, b: Any) -> bool:
    """Whether two examples hold the same tensors."""
    one, other = (list(leaves(as_tensors(each, None))) for each in (a, b))
    return len(one) == len(other) and all(
        p.shape == q.shape and torch.equal(p.nan_to_num(), q.nan_to_num()) for p, q in zip(one, other, strict=True)
    )
