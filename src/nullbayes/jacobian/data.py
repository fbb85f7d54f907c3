"""The contract of the training data: the same examples in the same order whenever they are read, and all of them.

Projections visit the rows again and again; a loader that shuffles or augments would silently pair the factors of
one set of rows with another. The data are read once, checked by reading their beginning again, and held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from nullbayes.errors import DataError
from nullbayes.jacobian.fingerprint import raw

BatchFn = Callable[[Any], tuple[Any, Tensor]]
_PROBED_BATCHES = 2  # read twice; a shuffled or augmented batch differs with near certainty
_KEPT_ON_DEVICE = 2**31  # bytes of data that may lie beside the model
_RECIPE = "DataLoader(dataset, batch_size=..., shuffle=False)"


def leaves(x: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of an input: a tensor, or a tuple, list or mapping of inputs."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from leaves(value)
    elif isinstance(x, (tuple, list)):
        for value in x:
            yield from leaves(value)


def map_leaves(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Apply a function to every tensor of inputs of the same structure; other values stay those of the first."""
    if isinstance(x, Tensor):
        return function(x, *others)
    if isinstance(x, Mapping):
        return {key: map_leaves(function, value, *(o[key] for o in others)) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        parts = [map_leaves(function, value, *(o[i] for o in others)) for i, value in enumerate(x)]
        return tuple(parts)
    return x


def n_examples(x: Any) -> int:
    """Return the number of examples in an input."""
    lengths = {len(leaf) for leaf in leaves(x) if leaf.ndim}
    if len(lengths) != 1:
        what = f"tensors of different lengths {sorted(lengths)}" if lengths else f"no tensor (it is {type(x).__name__})"
        msg = f"An input must hold tensors with one entry an example; this one holds {what}."
        raise DataError(msg)
    return lengths.pop()


def take_examples(x: Any, start: int, stop: int) -> Any:
    """Return some examples of an input; what has no dimension belongs to all of them."""
    return map_leaves(lambda leaf: leaf[start:stop] if leaf.ndim else leaf, x)


def example_dims(x: Any) -> Any:
    """Return ``in_dims`` for ``vmap`` over examples: 0 for tensors that have them, None for what all share."""
    if isinstance(x, Mapping):
        return {key: example_dims(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(example_dims(value) for value in x)
    return 0 if isinstance(x, Tensor) and x.ndim else None


def as_batch(x: Any, dims: Any) -> Any:
    """Return one example, as ``vmap`` over ``dims`` hands it out, as a batch of one."""
    return map_leaves(lambda leaf, dim: leaf if dim is None else leaf[None], x, dims)


def to_device(x: Any, device: torch.device) -> Any:
    """Move every tensor of an input."""
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), x)


def split_batch(batch: Any, batch_fn: BatchFn | None) -> tuple[Any, Tensor]:
    """Return inputs and targets of a training batch."""
    if batch_fn is not None:
        x, y = batch_fn(batch)
        return x, y
    if isinstance(batch, Mapping):
        key = next((k for k in ("labels", "label", "targets", "target", "y") if k in batch), None)
        if key is not None:
            return {k: v for k, v in batch.items() if k != key}, batch[key]
    elif isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    msg = (
        f"A training batch must be a pair (inputs, targets) or a mapping with 'labels', not {type(batch).__name__}: "
        "say how to take it apart with batch_fn=lambda batch: (inputs, targets)."
    )
    raise DataError(msg)


def inputs_of(batch: Any, batch_fn: BatchFn | None) -> Any:
    """Return the inputs of a batch that may come without targets."""
    if batch_fn is None and isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    if isinstance(batch, Tensor) or (batch_fn is None and isinstance(batch, tuple) and len(batch) != 2):
        return batch
    try:
        return split_batch(batch, batch_fn)[0]
    except DataError:
        return batch


class Examples:
    """All training examples, in order, to be read in ranges as often as needed.

    Parameters
    ----------
    loader : iterable of batches
        A DataLoader, a list of batches, or anything that can be iterated twice with the same result.
    batch_fn : callable, optional
        Turns a batch into ``(inputs, targets)``.
    device : torch.device
        Where ranges are delivered.
    """

    def __init__(self, loader: Iterable[Any], batch_fn: BatchFn | None, device: torch.device) -> None:
        _refuse_random_order(loader)
        self.device = device
        self._batches: list[tuple[Any, Tensor]] = []
        self._starts = [0]
        expected: list[tuple[int, ...]] = []
        for i, batch in enumerate(loader):
            x, y = split_batch(batch, batch_fn)
            _check_batch(i, x, y)
            shapes = [tuple(leaf.shape[1:]) for leaf in (*leaves(x), y)]
            expected = shapes if i == 0 else expected
            if shapes != expected:
                pairs = zip(shapes, expected, strict=False)
                got, wanted = next((pair for pair in pairs if pair[0] != pair[1]), (shapes, expected))
                msg = f"Batch {i} holds examples of shape {got}, the earlier ones {wanted}: pad all to one shape."
                raise DataError(msg)
            self._batches.append((x, y))
            self._starts.append(self._starts[-1] + len(y))
        if not self._batches:
            msg = "The loader is empty: it yields no batch."
            raise DataError(msg)
        self._probe(loader, batch_fn)
        size = sum(leaf.numel() * leaf.element_size() for x, y in self._batches for leaf in (*leaves(x), y))
        if device.type != "cpu" and size <= _KEPT_ON_DEVICE:  # else they would travel in every sweep
            self._batches = [(to_device(x, device), y.to(device)) for x, y in self._batches]

    def __len__(self) -> int:
        """Return the number of examples seen."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Return inputs and targets of examples ``start`` to ``stop``, on the device."""
        pieces = []
        for (x, y), first in zip(self._batches, self._starts, strict=False):
            a, b = max(start, first) - first, min(stop, first + len(y)) - first
            if a < b:
                pieces.append((take_examples(x, a, b), y[a:b]))
        x = pieces[0][0]
        if len(pieces) > 1:
            x = map_leaves(lambda *parts: torch.cat(parts) if parts[0].ndim else parts[0], *(p[0] for p in pieces))
        y = pieces[0][1] if len(pieces) == 1 else torch.cat([p[1] for p in pieces])
        return to_device(x, self.device), y.to(self.device)

    def ranges(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Iterate over ranges of at most ``size`` examples."""
        end = len(self) if stop is None else stop
        for first in range(start, end, size):
            yield first, min(end, first + size)

    def fingerprint(self) -> str:
        """Return a hash of all examples in their order, whatever the batches they came in."""
        digests: list[Any] = []
        for x, y in self._batches:
            parts = [*leaves(x), y]
            digests = digests or [hashlib.sha256(f"{part.dtype} {part.shape[1:]}".encode()) for part in parts]
            for digest, part in zip(digests, parts, strict=True):
                digest.update(raw(part) if part.ndim else b"")
        return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()

    def _probe(self, loader: Iterable[Any], batch_fn: BatchFn | None) -> None:
        seen = 0
        for batch in loader:
            if seen == min(_PROBED_BATCHES, len(self._batches)):
                return
            x, y = split_batch(batch, batch_fn)
            old_x, old_y = self._batches[seen]
            same = [
                a.shape == b.shape and bool(torch.equal(a, b))
                for a, b in zip([*leaves(x), y], [*leaves(old_x), old_y], strict=False)
            ]
            if not all(same):
                msg = (
                    f"Batch {seen} is not the same when the loader is read a second time: it shuffles or augments. "
                    "Rows are revisited in order, so pass the data as the network should remember them: "
                    f"{_RECIPE}, no random transforms."
                )
                raise DataError(msg)
            seen += 1
        if seen < min(_PROBED_BATCHES, len(self._batches)):
            msg = "The loader can be read only once: pass a DataLoader, or list(loader)."
            raise DataError(msg)


def _refuse_random_order(loader: Iterable[Any]) -> None:
    if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
        msg = (
            f"The loader must yield batches (inputs, targets), not be a {type(loader).__name__}: "
            f"{_RECIPE}, or [(x, y)]."
        )
        raise DataError(msg)
    if isinstance(loader, tuple):
        msg = "The loader is a tuple; one batch (x, y) is passed as a list of batches: [(x, y)]."
        raise DataError(msg)
    if not isinstance(loader, DataLoader):
        return
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", loader.sampler)
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        msg = (
            f"The loader draws examples in random order ({type(sampler).__name__}). Rows are revisited in "
            f"order, so pass {_RECIPE}."
        )
        raise DataError(msg)
    if getattr(batches, "drop_last", False):
        try:
            left = str(len(sampler) % batches.batch_size)  # type: ignore[arg-type, union-attr]
        except TypeError:
            left = "few"  # a stream does not say how long it is
        if left != "0":
            msg = (
                f"The loader drops its last {left} examples (drop_last=True): the posterior would be free to change "
                "their predictions. Pass drop_last=False."
            )
            raise DataError(msg)


def _check_batch(i: int, x: Any, y: Tensor) -> None:
    if not isinstance(y, Tensor) or y.ndim == 0:
        msg = f"Batch {i}: targets must be a tensor with one entry an example, not {type(y).__name__}."
        raise DataError(msg)
    n = n_examples(x)
    if n != len(y):
        msg = f"Batch {i} holds {n} inputs but {len(y)} targets."
        raise DataError(msg)
    if n == 0:
        msg = f"Batch {i} is empty."
        raise DataError(msg)
    for leaf in (*leaves(x), y):
        if leaf.is_floating_point() and not torch.isfinite(leaf).all():
            msg = f"Batch {i} holds NaN or Inf: clean the data before fitting."
            raise DataError(msg)
