"""What people pass as data: a loader, arrays, a dataset; and whether it can be read in order, all of it."""

from __future__ import annotations

import contextlib
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
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

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
    more = "; it also " + _augmentation(loader.dataset) if _augmentation(loader.dataset) else ""
    repair = f"nb.evaluation_loader(loader) makes one that does {'neither' if len(reasons) > 1 else 'not'}"
    msg = f"The loader {' and '.join(reasons)}{more}. {purpose}: pass {_wanted(loader)}; {repair}."
    raise DataError(msg + (" Augmentation is for you to switch off in the dataset." if more else ""))


def evaluation_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same examples, each once and in order: what ``fit`` and ``predict`` need.

    It has the dataset, the collate function, the batch size and the workers of the one that was used for training, but
    neither shuffles nor drops the last batch. Of a loader with a ``SubsetRandomSampler`` it takes the same subset.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        For training. From Lightning: ``trainer.train_dataloader``, or ``datamodule.train_dataloader()``. The Hugging
        Face ``Trainer`` makes the right one itself: ``trainer.get_eval_dataloader(trainer.train_dataset)``.

    Raises
    ------
    DataError
        If the dataset gives another example when it is asked twice: random augmentation can only be switched off where
        the dataset is made.

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
    dataset, sampler = loader.dataset, _sampler(loader)
    if reason := _augmentation(dataset):
        msg = f"The loader {reason}. Make the dataset once more with the transforms that you evaluate with."
        raise DataError(msg)
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, sorted(sampler.indices))
    workers: dict[str, Any] = {"num_workers": loader.num_workers, "worker_init_fn": loader.worker_init_fn}
    if loader.num_workers:
        workers |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
        workers |= {"multiprocessing_context": loader.multiprocessing_context, "timeout": loader.timeout}
    return DataLoader(
        dataset, batch_size=_batch_size(loader), collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, **workers
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
    return f"draws examples in random order ({type(sampler).__name__})" if isinstance(sampler, _RANDOM) else ""


def _losses(loader: DataLoader[Any]) -> str:
    batches = loader.batch_sampler
    if not getattr(batches, "drop_last", getattr(loader, "drop_last", False)):
        return ""
    try:
        left = len(_sampler(loader)) % batches.batch_size  # type: ignore[union-attr]
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
    state = np.random.get_state()  # noqa: NPY002 - what transforms draw from, too
    try:
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=()):  # whatever it is, reading will tell
            for i in range(min(_ASKED_TWICE, len(dataset))):
                if not _equal(dataset[i], dataset[i]):
                    transform = getattr(dataset, "transform", None)
                    named = "" if transform is None else f", by its transform {type(transform).__name__}"
                    return f"gives another example {i} each time (random augmentation{named})"
    finally:
        np.random.set_state(state)  # noqa: NPY002
    return ""


def _equal(a: Any, b: Any) -> bool:
    """Whether two examples hold the same tensors."""
    one, other = (list(leaves(as_tensors(each, None))) for each in (a, b))
    return len(one) == len(other) and all(
        p.shape == q.shape and torch.equal(p.nan_to_num(), q.nan_to_num()) for p, q in zip(one, other, strict=True)
    )
