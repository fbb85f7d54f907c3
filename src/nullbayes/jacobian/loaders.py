"""What people pass as data: a loader, arrays, a dataset; and whether it can be read in order, all of it."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
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

RECIPE = "DataLoader(dataset, batch_size=..., shuffle=False)"
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ASKED_TWICE = 3  # examples of a dataset, to see whether it augments
_BATCH = 256  # examples, where a dataset is cut into batches here


def as_loader(data: Any) -> Iterable[Any]:
    """Return an iterable of batches: of inputs and targets as one pair, of a dataset, or the loader itself."""
    if isinstance(data, tuple) and len(data) == 2 and _is_data(data):
        return [data]
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        return DataLoader(data, batch_size=_BATCH)
    if is_array(data) or isinstance(data, (Mapping, str)) or not isinstance(data, Iterable):
        msg = (
            f"The training data must be batches (inputs, targets), not be a {type(data).__name__}: "
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


def batches(data: Any, batch_fn: BatchFn | None, dtype: torch.dtype) -> Iterator[tuple[Any, Tensor]]:
    """Iterate over inputs and targets once, in whatever order they come."""
    with torch.random.fork_rng(devices=()):  # a DataLoader draws a seed
        iterator = iter(as_loader(data))
    for number, batch in enumerate(iterator):
        yield numbered(number, batch, batch_fn, dtype)


def numbered(i: int, batch: Any, batch_fn: BatchFn | None, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Take a batch apart, and name it where that fails."""
    try:
        return split_batch(batch, batch_fn, dtype)
    except DataError as error:
        msg = f"Batch {i}: {error}"
        raise DataError(msg) from None


def check_order(loader: Iterable[Any], purpose: str) -> None:
    """Refuse a DataLoader that does not go through all examples in order, with every reason at once."""
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


def evaluation_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same examples, each once and in order: what ``fit`` and ``predict`` need.

    It has the dataset, the collate function, the batch size and the workers of the one that was used for training, but
    neither shuffles nor drops the last batch. Of a loader whose sampler takes some of the examples, such as a
    ``SubsetRandomSampler`` or a list of indices, it takes the same ones.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        For training. From Lightning: ``trainer.train_dataloader``, or ``datamodule.train_dataloader()``. The Hugging
        Face ``Trainer`` makes the right one itself: ``trainer.get_eval_dataloader(trainer.train_dataset)``.

    Raises
    ------
    DataError
        If the dataset gives another example when it is asked twice: random augmentation can only be switched off where
        the dataset is made. Or if a sampler of one's own takes other examples each time.

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
    if chosen is not None:
        dataset = Subset(dataset, chosen)
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
    """Whether a tuple is inputs and targets, rather than two batches."""
    x, y = pair
    return is_array(y) and (is_array(x) or any(True for _ in leaves(as_tensors(x, None))))


def _sampler(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _wanted(loader: DataLoader[Any]) -> str:
    return RECIPE.replace(")", ", drop_last=False)") if _losses(loader) else RECIPE


def _randomness(loader: DataLoader[Any]) -> str:
    sampler = _sampler(loader)
    shuffles = isinstance(sampler, _RANDOM) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    if not shuffles and not _is_known(sampler):
        one, other = _read_twice(loader)
        shuffles = one != other
    return f"draws examples in random order ({type(sampler).__name__})" if shuffles else ""


def _is_known(sampler: Any) -> bool:
    """Whether a sampler is one of torch's own, or fixed indices."""
    return isinstance(sampler, (SequentialSampler, DistributedSampler, list, tuple, range)) or (
        type(sampler).__module__.startswith("torch.utils.data")
    )


def _read_twice(loader: DataLoader[Any]) -> tuple[list[Any], list[Any]]:
    """Return the indices of a pass, and of another one."""
    own_batches = _has_own_batches(loader)
    source: Any = loader.batch_sampler if own_batches else _sampler(loader)
    with _random_numbers_kept(), contextlib.suppress(TypeError):  # one that does not say how long it is
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
    """Return which examples a loader takes, in order; None for all of them."""
    sampler = _sampler(loader)
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(sampler.indices)
    whole = isinstance(sampler, (RandomSampler, WeightedRandomSampler, SequentialSampler, DistributedSampler))
    if isinstance(loader.dataset, IterableDataset) or (whole and not _has_own_batches(loader)):
        return None
    one, other = (sorted(set(indices)) for indices in _read_twice(loader))
    if one != other:
        msg = (
            f"The sampler of the loader ({type(sampler).__name__}) takes other examples each time: make a loader of "
            f"those that the network was trained on, {RECIPE}."
        )
        raise DataError(msg)
    return one or None


def _losses(loader: DataLoader[Any]) -> str:
    batches, sampler = loader.batch_sampler, _sampler(loader)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        return f"takes one part in {sampler.num_replicas} of the examples (DistributedSampler)"
    if not getattr(batches, "drop_last", getattr(loader, "drop_last", False)):
        return ""
    try:
        left = len(sampler) % batches.batch_size  # type: ignore[union-attr]
    except (TypeError, AttributeError):
        return "drops its last few examples (drop_last=True)"  # a stream does not say how long it is
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
    """Say how a dataset differs from itself; nothing where it does not, or cannot be asked twice."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return ""
    with contextlib.suppress(Exception), _random_numbers_kept():  # whatever it is, reading will tell
        for i in range(min(_ASKED_TWICE, len(dataset))):
            if not _equal(dataset[i], dataset[i]):
                transform = getattr(dataset, "transform", None)
                named = "" if transform is None else f", by its transform {type(transform).__name__}"
                return f"gives another example {i} each time (random augmentation{named})"
    return ""


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leave the random numbers of torch, NumPy and Python as they were: datasets and samplers draw from any of them."""
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
