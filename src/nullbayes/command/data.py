"""A user's data: what ``--data`` stands for, its batches one by one, and parts of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import nullbayes as nb
from nullbayes.command.frame import Console, Refusal
from nullbayes.command.names import first_line, named

_AT_ONCE = 1024  # examples of data that come in one piece
_BATCH = 256  # examples per batch of a dataset


class _Again:
    """What a generator function yields, as often as it is asked."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self._function()


def read_data(text: str, option: str, console: Console) -> Any:
    """Return the data that a name stands for, or what it returns, in a form that every function of the library takes.

    ``option`` is the one that the name was passed to, for messages. The order is fixed: where a loader shuffles, that
    is undone, and the console told. A mapping is a batch.
    """
    found = named(text, option)
    if _is_function(found):
        made = call(found, text, option)
        found = _Again(found) if isinstance(made, Iterator) else made
    if found is None:
        msg = f"{option} {text} is None: it should be a loader, a dataset, or a pair (x, y)."
        raise Refusal(msg)
    if isinstance(found, Mapping) or (isinstance(found, list) and len(found) == 2 and _are_arrays(found)):
        found = [found] if isinstance(found, Mapping) else tuple(found)
    if isinstance(found, DataLoader) and not isinstance(found.dataset, IterableDataset):
        plain = found.batch_sampler is None or type(found.batch_sampler) is BatchSampler
        if not plain or not isinstance(found.sampler, SequentialSampler) or found.drop_last:
            found = nb.evaluation_loader(found)
            console.say(f"{text} shuffles or drops examples: all of them are read, in order.")
    return found


def read_pairs(text: str, option: str, console: Console) -> Any:
    """Return the data that a name stands for, which must have targets: see `read_data`."""
    found = read_data(text, option, console)
    if is_array(found):
        msg = f"{option} {text} is inputs without targets: it should be a pair (x, y), or a dataset or loader of pairs."
        raise Refusal(msg)
    return found


def call(function: Callable[[], Any], text: str, option: str) -> Any:
    """Call a user's function without arguments; an error says whose it is."""
    try:
        return function()
    except nb.errors.NullBayesError:
        raise
    except Exception as error:
        msg = (
            f"{option} {text} failed when it was called without arguments, {type(error).__name__}: {first_line(error)}"
        )
        raise Refusal(msg) from error


class Given(list[Any]):
    """Batches that are no user's loader, but parts of what was passed without one: batch_fn is not for them."""

    without_batch_fn = True


def is_given(data: Any) -> bool:
    """Whether data are inputs or a pair without a loader, to which batch_fn is not applied, or made of such."""
    return isinstance(data, tuple) or is_array(data) or getattr(data, "without_batch_fn", False)


def as_inputs(data: Any) -> Any:
    """Return data whose targets are to be skipped: a pair is a batch, not two arguments of the network."""
    return Given([data]) if isinstance(data, tuple) else data


def batches(data: Any) -> Iterator[Any]:
    """Iterate over batches of inputs, with or without targets; data in one piece are cut."""
    if isinstance(data, Dataset) and not isinstance(data, DataLoader):
        data = DataLoader(data, batch_size=_BATCH)
    whole = isinstance(data, tuple) or is_array(data)
    for batch in [data] if whole else data:
        n = count(batch)
        for start in range(0, n, _AT_ONCE):
            yield batch if n <= _AT_ONCE else take(batch, slice(start, start + _AT_ONCE))


def inputs_in(batch: Any, batch_fn: Callable[[Any], Any] | None) -> Any:
    """Return what of a batch can be shown: its inputs as a tensor, or None if they are something else."""
    if batch_fn is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError):  # it expects batches with targets
            batch = batch_fn(batch)
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if is_array(x) and not isinstance(x, Tensor) and not hasattr(x, "iloc"):
        x = torch.as_tensor(x)
    return x if isinstance(x, Tensor) and x.ndim > 0 else None


def count(batch: Any) -> int:
    """Return the number of examples of a batch."""
    if isinstance(batch, Mapping):
        return count(next(iter(batch.values()), ()))
    if isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (str, int, float)):
        return count(batch[0])
    return len(batch)


def take(batch: Any, which: Any) -> Any:
    """Return some examples of a batch, in the same form; ``which`` is a slice or a tensor of numbers."""
    if isinstance(batch, Mapping):
        return {key: take(value, which) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (str, int, float)):
        return type(batch)(take(value, which) for value in batch)
    if isinstance(batch, Tensor):
        return batch[which.to(batch.device) if isinstance(which, Tensor) else which]
    places = which.tolist() if isinstance(which, Tensor) else which
    if hasattr(batch, "iloc"):
        return batch.iloc[places]
    if isinstance(batch, (list, tuple)) and isinstance(places, list):
        return type(batch)(batch[i] for i in places)
    return batch[places]


class _Part:
    """The examples of some data that a random number chooses; it is the same in every pass."""

    def __init__(self, data: Any, share: float, *, inside: bool) -> None:
        self._data, self._share, self._inside = data, share, inside
        self.without_batch_fn = is_given(data)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for batch in batches(self._data):
            chosen = torch.rand(count(batch), generator=generator, device="cpu") < self._share
            where = (chosen if self._inside else ~chosen).nonzero()[:, 0]
            if len(where):
                yield take(batch, where)


def number_of(data: Any, most: int) -> int:
    """Return the number of examples, without reading more of them than it takes to find so many."""
    total = 0
    for batch in batches(data):
        total += count(batch)
        if total >= most:
            break
    return total


def divided(data: Any, share: float) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return a random share of some data, and the rest; no example is in both."""
    return _Part(data, share, inside=True), _Part(data, share, inside=False)


def _is_function(found: Any) -> bool:
    """Whether something is to be called: a function or a class, and not data that happen to be callable."""
    if isinstance(found, (type, functools.partial)):
        return True
    return callable(found) and not hasattr(found, "__iter__") and not hasattr(found, "__getitem__")


def is_array(x: Any) -> bool:
    """Whether something is a tensor or an array: inputs alone, where it is passed as data."""
    return isinstance(x, Tensor) or (hasattr(x, "__array__") and getattr(x, "ndim", 0) > 0)


def _are_arrays(values: list[Any]) -> bool:
    """Whether a list of two is inputs and targets: arrays of as many examples, the second with fewer dimensions."""
    return all(map(is_array, values)) and len(values[0]) == len(values[1]) and values[1].ndim < values[0].ndim
