"""The contract of the training data: the same examples in the same order whenever they are read, and all of them.

Projections visit the rows again and again; data that change would silently pair the factors of one set of rows with
another. The data are read once, with a checksum for each example, and held, or read anew in each sweep where they are
larger than memory; what is read later is compared with what was read first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import DataError
from nullbayes.hashing import checksums, fingerprint
from nullbayes.jacobian.batches import (
    BatchFn,
    join_examples,
    layout,
    leaves,
    map_leaves,
    n_examples,
    take_examples,
    to_device,
)
from nullbayes.jacobian.loaders import RECIPE, as_loader, check_order, numbered
from nullbayes.jacobian.stream import Batch, Stream, batch_bytes
from nullbayes.memory import free_memory

_PROBED_BATCHES = 2  # read twice at once; a shuffled or augmented batch differs with near certainty
_KEPT_ON_DEVICE = 2**31  # bytes of data that may lie beside the model
_HELD_SHARE = 0.25  # of the free memory of the host
_NAMED = 5  # examples that an error names
IN_ORDER = "A fit reads the data several times, and must find all examples in the same order"


class Examples:
    """All training examples, in order, to be read in ranges as often as needed.

    Parameters
    ----------
    data : iterable of batches, pair (inputs, targets), or dataset
        A DataLoader, a list of batches, or anything that can be iterated twice with the same result; or all inputs and
        all targets, as tensors or arrays.
    batch_fn : callable, optional
        Turns a batch into ``(inputs, targets)``.
    device : torch.device
        Where ranges are delivered.
    dtype : torch.dtype, optional
        Of the tensors that arrays of floating-point numbers become; by default torch's own.
    held_bytes : int, optional
        How much of the data is held in the memory of the host; more is read from the loader in each sweep. By default a
        quarter of what is free.

    Attributes
    ----------
    partial : bool
        Whether these are only some of the training data.
    """

    partial = False

    def __init__(
        self,
        data: Any,
        batch_fn: BatchFn | None,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        held_bytes: int | None = None,
    ) -> None:
        loader = as_loader(data)
        check_order(loader, IN_ORDER)
        if held_bytes is None:
            held_bytes = int(_HELD_SHARE * free_memory(torch.device("cpu")))
        self.device, self._batch_fn = device, batch_fn
        self._dtype = dtype or torch.get_default_dtype()
        self._starts = [0]
        self._layout: dict[str, Any] = {}
        self._batches: list[Batch] | None = []  # None: too large to hold
        self._sums, size = self._read_all(loader, held_bytes)
        self._stream: Stream | None = Stream(loader, len(self._starts) - 1, held_bytes)
        self._fixed = False  # whether nobody else can write into what is held
        self._probe()
        if self._batches is None:
            return
        self._stream = None
        if device.type != "cpu" and size <= _KEPT_ON_DEVICE:  # else they would travel in every sweep
            own = [(to_device(x, device), y.to(device)) for x, y in self._batches]
            pairs = zip(leaves(own), leaves(self._batches), strict=True)
            self._batches, self._fixed = own, all(new is not old for new, old in pairs)

    def __len__(self) -> int:
        """Return the number of examples seen."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Return inputs and targets of examples ``start`` to ``stop``, on the device, compared with the first time.

        They are nobody else's, so that a network may work on its input in place.
        """
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1) - 1
        if self._stream is not None:
            batches = self._stream.read(first, last, self._split_again)
        else:
            assert self._batches is not None
            batches = self._batches[first : last + 1]
        pieces = []
        for i, (x, y) in enumerate(batches, first):
            a, b = max(start - self._starts[i], 0), min(stop, self._starts[i + 1]) - self._starts[i]
            pieces.append((take_examples(x, a, b), y[a:b]))
            if not self._fixed:
                self._compare(i, a, *pieces[-1])
        if len(pieces) > 1:
            return to_device(join_examples(pieces), self.device)  # type: ignore[no-any-return]
        moved: tuple[Any, Tensor] = map_leaves(
            lambda leaf: leaf.to(self.device, non_blocking=True, copy=True), pieces[0]
        )
        return moved

    def chosen(self, numbers: Sequence[int]) -> Examples:
        """Return some of the examples, by their numbers in ascending order, read once and held."""
        return _Chosen(self, numbers)

    def some(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over examples by their numbers, in ascending order; those of a batch together, on the device."""
        groups = [(batch, list(group)) for batch, group in groupby(numbers, self.batch_of)]
        within = torch.tensor([n - self._starts[batch] for batch, group in groups for n in group], device=self.device)
        for (batch, group), where in zip(groups, within.split([len(group) for _, group in groups]), strict=True):
            first = self._starts[batch]
            if self._fixed and self._batches is not None:  # what nobody else can write into need not be compared
                pair, shift = self._batches[batch], 0
            else:
                shift = group[0] - first
                pair = self.read(first + shift, group[-1] + 1)
            yield map_leaves(lambda leaf, at=where - shift: leaf[at] if leaf.ndim else leaf, pair)

    def ranges(self, size: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Iterate over ranges of at most ``size`` examples."""
        end = len(self) if stop is None else stop
        for first in range(start, end, size):
            yield first, min(end, first + size)

    def batch_of(self, number: int) -> int:
        """Return the batch that an example is in."""
        return bisect_right(self._starts, number) - 1

    def name(self, examples: Iterable[int]) -> str:
        """Say in which batches some examples are, and where in them."""
        groups = groupby(sorted(examples), self.batch_of)
        named, left = [], _NAMED
        for batch, members in groups:
            inside = [str(n - self._starts[batch]) for n in members]
            shown = inside[:left]
            left -= len(shown)
            if not shown:
                named.append("and later batches")
                break
            more = f" and {len(inside) - len(shown)} more" if len(shown) < len(inside) else ""
            named.append(
                f"batch {batch} (its example{'s'[: len(inside) > 1]} {', '.join(shown)}{more}, counted from 0)"
            )
        return ", ".join(named)

    def fingerprint(self) -> str:
        """Return a hash of all data: of the checksums of the examples in their order, their shapes and their types."""
        return fingerprint([("checksums", self._sums)], repr(self._layout))

    def _read_all(self, loader: Iterable[Any], held_bytes: int) -> tuple[Tensor, int]:
        """Read the data for the first time; return checksums and bytes."""
        sums, size = [], 0
        for i, batch in enumerate(loader):
            x, y = numbered(i, batch, self._batch_fn, self._dtype)
            check_batch(i, x, y)
            found = _layout(i, x, y)
            self._layout = self._layout or found
            if found != self._layout:
                raise DataError(_difference(i, found, self._layout))
            sums.append(checksums(leaves((x, y)), len(y)))
            self._starts.append(self._starts[-1] + len(y))
            size += batch_bytes(x, y)
            if size > held_bytes:
                self._batches = None
            if self._batches is not None:
                self._batches.append((x, y))
        if not sums:
            msg = "The loader is empty: it yields no batch."
            raise DataError(msg)
        return torch.cat(sums), size

    def _probe(self) -> None:
        """Read the beginning a second time, by which most loaders that are not repeatable give themselves away."""
        assert self._stream is not None
        last = min(_PROBED_BATCHES, len(self._starts) - 1) - 1
        for i, batch in enumerate(self._stream.read(0, last, self._split_again)):
            self._compare(i, 0, *batch)

    def _split_again(self, i: int, batch: Any) -> Batch:
        x, y = numbered(i, batch, self._batch_fn, self._dtype)
        if len(y) != self._starts[i + 1] - self._starts[i] or _layout(i, x, y) != self._layout:
            raise DataError(self._changed(i))
        if i == 0:  # which is held from pass to pass, so that nobody may read this one
            self._compare(i, 0, x, y)
        return x, y

    def _compare(self, i: int, offset: int, x: Any, y: Tensor) -> None:
        """Refuse examples of a batch, from an offset on, that are not what they were."""
        start = self._starts[i] + offset
        same = checksums(leaves((x, y)), len(y)) == self._sums[start : start + len(y)]
        if not same.all():
            raise DataError(self._changed(i))

    def _changed(self, i: int) -> str:
        if self._stream is None:
            return (
                f"Batch {i} has changed since the data were first read: something writes into its tensors. Leave them "
                "alone until the posterior is done with them, or pass a copy, [(x.clone(), y.clone())]."
            )
        return (
            f"Batch {i} is not the same when the loader is read a second time: it shuffles or augments, or its tensors "
            "were written into. Rows are revisited in order, so pass the data as the network should remember them: "
            f"{RECIPE}, no random transforms."
        )


class _Chosen(Examples):
    """Some of the examples, held on the device."""

    partial = True

    def __init__(self, whole: Examples, numbers: Sequence[int]) -> None:
        self.device, self._whole, self._numbers = whole.device, whole, list(numbers)
        self._held = join_examples(list(whole.some(self._numbers)))

    def __len__(self) -> int:
        """Return how many were chosen."""
        return len(self._numbers)

    def read(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Return copies of some of them."""
        x, y = self._held
        moved: tuple[Any, Tensor] = map_leaves(
            lambda leaf: leaf.clone(), (take_examples(x, start, stop), y[start:stop])
        )
        return moved

    def name(self, examples: Iterable[int]) -> str:
        """Say which examples of the whole they are."""
        return self._whole.name(self._numbers[i] for i in examples)


def _layout(i: int, x: Any, y: Tensor) -> dict[str, Any]:
    try:
        return layout(x, y)
    except DataError as error:
        msg = f"Batch {i}: {error}"
        raise DataError(msg) from None


def check_batch(i: int, x: Any, y: Tensor) -> None:
    """Refuse a batch that is empty, or whose inputs and targets are not as many, or not finite."""
    n = n_examples(x)
    if n != len(y):
        msg = f"Batch {i} holds {n} inputs but {len(y)} targets."
        raise DataError(msg)
    if n == 0:
        msg = f"Batch {i} is empty."
        raise DataError(msg)
    for what, part in (("inputs", x), ("targets", y)):
        for leaf in leaves(part):
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                where = ""
                if leaf.ndim:
                    bad = (~torch.isfinite(leaf)).flatten(1).any(1) if leaf.ndim > 1 else ~torch.isfinite(leaf)
                    where = f", the first at example {int(bad.nonzero()[0])}, counted from 0"
                msg = f"Batch {i} holds NaN or Inf in its {what}{where}: clean the data before fitting."
                raise DataError(msg)


def _difference(i: int, found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Say what of a batch is not as in the earlier ones."""
    if list(found) != list(expected):
        return f"Batch {i} holds {', '.join(found)}, the earlier ones {', '.join(expected)}: pass batches of one kind."
    path = next(path for path in expected if found[path] != expected[path])
    got, wanted = found[path], expected[path]
    if isinstance(got, tuple) and isinstance(wanted, tuple):
        if got[1] != wanted[1]:
            return f"Batch {i} holds {path} of type {got[1]}, the earlier ones {wanted[1]}: convert all to one type."
        if isinstance(got[0], tuple):
            return (
                f"Batch {i} holds {path} of shape {got[0]} an example, the earlier ones {wanted[0]}: pad all to one "
                'shape (a tokenizer or collator that pads each batch by itself: padding="max_length").'
            )
        got, wanted = got[0], wanted[0]
    return (
        f"Batch {i} holds {got!r} as {path}, the earlier ones {wanted!r}: what has no entry for each example belongs "
        "to all of them, so pass a tensor with one entry an example, or the same in every batch."
    )
