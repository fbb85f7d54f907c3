"""The training data: the same examples in the same order whenever they are read.

Projections visit the rows again and again. Data that change would silently combine the factors of one set of rows with
another set. So the data are read once, with a checksum for each example, and then held, or read again in each sweep if
they are larger than memory; what is read later is compared with the checksums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from nullbayes.distributed import ALONE, Group
from nullbayes.errors import DataError
from nullbayes.hashing import checksums, fingerprint
from nullbayes.jacobian.batches import (
    BatchFn,
    check_columns,
    columns_of,
    first_bad,
    input_checksums,
    join_examples,
    layout,
    leaves,
    map_leaves,
    n_examples,
    signed,
    single_checksums,
    take_examples,
    to_device,
)
from nullbayes.jacobian.loaders import (
    IN_ORDER,
    RECIPE,
    Batch,
    Stream,
    as_loader,
    batch_bytes,
    batch_fn_for,
    check_order,
    numbered,
)
from nullbayes.jacobian.sharding import own_part
from nullbayes.limits import free_memory
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.shared import JointRows

_PROBED_BATCHES = 2  # read twice at the start: a shuffled or augmented batch differs almost certainly
_KEPT_ON_DEVICE = 2**31  # bytes of data that may be kept on the device
_HELD_SHARE = 0.25  # of the free memory of the host
_NAMED = 5  # examples that an error names


class Examples:
    """All training examples, in order, to be read in ranges as often as needed.

    Where several processes share them, these are the consecutive ones that this process has: it reads and holds no
    others. Examples are then numbered through all processes in order of rank.

    Parameters
    ----------
    data : iterable of batches, pair (inputs, targets), or dataset
        A DataLoader, a list of batches, or anything that can be iterated twice with the same result; or all inputs and
        all targets, as tensors or arrays.
    batch_fn : callable, optional
        Turns a batch of a loader into ``(inputs, targets)``.
    device : torch.device
        The device of what :meth:`read` returns.
    dtype : torch.dtype, optional
        The type of tensors that are made of floating-point arrays; by default that of torch.
    held_bytes : int, optional
        How much data may be held in host memory; more than that is read from the loader in each sweep. By default a
        quarter of the free memory. It is not part of a ``memory_limit``.
    group : Group
        The processes that share the examples. Each is given all data, of which it reads a part, or a loader whose
        DistributedSampler has divided them already.

    Attributes
    ----------
    partial : bool
        Whether these are only some of the training data.
    input_sums : Tensor (N,)
        The checksum of every input, without its target, in single precision.
    exact_sums : Tensor (N,)
        The checksum of every input as it is.
    columns : sequence of str
        The names of the columns, where the inputs came as a table.
    """

    partial = False
    columns: Sequence[str] = ()

    def __init__(
        self,
        data: Any,
        batch_fn: BatchFn | None,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        held_bytes: int | None = None,
        group: Group = ALONE,
    ) -> None:
        loader = as_loader(data) if group.size == 1 else own_part(data, group)
        check_order(loader, IN_ORDER)
        if held_bytes is None:
            held_bytes = int(_HELD_SHARE * free_memory(torch.device("cpu")))
        self.device, self.group, self._batch_fn = device, group, batch_fn_for(loader, batch_fn)
        self._dtype = dtype or torch.get_default_dtype()
        self._starts = [0]
        self._layout: dict[str, Any] = {}
        self._batches: list[Batch] | None = []  # None: too large to hold
        self.input_sums, self.exact_sums, self._sums, size = self._read_all(loader, held_bytes)
        self._edges, self._all_sums = [0, *accumulate(group.gather(len(self)))], group.join(self._sums)
        layouts = sorted(set(group.gather(repr(self._layout))))
        if len(layouts) > 1:
            msg = f"The processes have examples of different forms: {' and '.join(layouts)}."
            raise DataError(msg)
        self._stream: Stream | None = Stream(loader, len(self._starts) - 1, held_bytes)
        self._fixed = False  # whether nobody else can write into the tensors that are held
        self._probe()
        if self._batches is None:
            return
        self._stream = None
        if device.type != "cpu" and size <= _KEPT_ON_DEVICE:  # else they would be moved in every sweep
            own = [(to_device(x, device), y.to(device)) for x, y in self._batches]
            pairs = zip(leaves(own), leaves(self._batches), strict=True)
            self._batches, self._fixed = own, all(new is not old for new, old in pairs)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._starts[-1]

    @property
    def n_all(self) -> int:
        """The number of examples of all processes."""
        return self._edges[-1]

    @property
    def n_most(self) -> int:
        """The largest number of examples that a process has."""
        return max(b - a for a, b in pairwise(self._edges))

    def parts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return which of some examples, by their ascending numbers among all, each process has, by its own numbers."""
        ends = [bisect_left(numbers, edge) for edge in self._edges]
        return [[number - self._edges[i] for number in numbers[a:b]] for i, (a, b) in enumerate(pairwise(ends))]

    def joined(self, rows: Rows) -> Rows:
        """Return the rows of the examples of all processes as one matrix, given those of this one."""
        return rows if self.group.size == 1 else JointRows(rows, self.group)

    def read(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Return copies of the inputs and targets of examples ``start`` to ``stop`` on the device, after a comparison.

        Raises
        ------
        DataError
            If they are not what was read the first time.
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
        """Return some of the examples by their ascending numbers, read once and held."""
        return _Chosen(self, numbers)

    def some(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Tensor]]:
        """Iterate over examples by their ascending numbers, those of a batch together, on the device."""
        groups = [(batch, list(group)) for batch, group in groupby(numbers, self.batch_of)]
        within = torch.tensor([n - self._starts[batch] for batch, group in groups for n in group], device=self.device)
        for (batch, group), where in zip(groups, within.split([len(group) for _, group in groups]), strict=True):
            first = self._starts[batch]
            if self._fixed and self._batches is not None:  # these need not be compared
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
        """Return the number of the batch that holds an example."""
        return bisect_right(self._starts, number) - 1

    def name(self, examples: Iterable[int]) -> str:
        """Describe in which batches some examples are, and where in them."""
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
        """Return a hash of the data of all processes: checksums of the examples in order, their shapes and types."""
        return fingerprint([("checksums", self._all_sums)], repr(self._layout))

    def _read_all(self, loader: Iterable[Any], held_bytes: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Read the data for the first time; return checksums of inputs and of all, and the size in bytes."""
        inputs: list[Tensor] = []
        exact, sums, size = list[Tensor](), list[Tensor](), 0
        for i, batch in enumerate(loader):
            if self._batch_fn is None:
                self.columns = self.columns or columns_of(batch)
                check_columns(batch, signed("", self.columns))
            x, y = numbered(i, batch, self._batch_fn, self._dtype)
            check_batch(i, x, y)
            found = _layout(i, x, y)
            self._layout = self._layout or found
            if found != self._layout:
                raise DataError(_difference(i, found, self._layout))
            exact.append(input_checksums(x, len(y)))
            inputs.append(single_checksums(x, len(y), exact[-1]))
            sums.append(checksums([y], len(y), exact[-1]))
            self._starts.append(self._starts[-1] + len(y))
            size += batch_bytes(x, y)
            if size > held_bytes:
                self._batches = None
            if self._batches is not None:
                self._batches.append((x, y))
        if not sums:
            msg = "The loader is empty: it yields no batch."
            raise DataError(msg)
        return torch.cat(inputs), torch.cat(exact), torch.cat(sums), size

    def _probe(self) -> None:
        """Read the first batches a second time, which shows most loaders that cannot be repeated."""
        assert self._stream is not None
        last = min(_PROBED_BATCHES, len(self._starts) - 1) - 1
        for i, batch in enumerate(self._stream.read(0, last, self._split_again)):
            self._compare(i, 0, *batch)

    def _split_again(self, i: int, batch: Any) -> Batch:
        x, y = numbered(i, batch, self._batch_fn, self._dtype)
        if len(y) != self._starts[i + 1] - self._starts[i] or _layout(i, x, y) != self._layout:
            raise DataError(self._changed(i))
        if i == 0:  # which the stream holds, so that it may never be compared later
            self._compare(i, 0, x, y)
        return x, y

    def _compare(self, i: int, offset: int, x: Any, y: Tensor) -> None:
        """Refuse examples of a batch, from an offset on, that have changed."""
        start = self._starts[i] + offset
        same = input_checksums(x, len(y), y) == self._sums[start : start + len(y)]
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
        self.device, self._whole, self.group, self.columns = whole.device, whole, whole.group, whole.columns
        parts = whole.parts(numbers)
        self._numbers = parts[self.group.rank]  # may be none, if other processes have them
        self._edges = [0, *accumulate(map(len, parts))]
        self._held = join_examples(list(whole.some(self._numbers))) if self._numbers else None

    def __len__(self) -> int:
        """Return the number of chosen examples."""
        return len(self._numbers)

    def read(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Return copies of some of the chosen examples."""
        assert self._held is not None
        x, y = self._held
        moved: tuple[Any, Tensor] = map_leaves(
            lambda leaf: leaf.clone(), (take_examples(x, start, stop), y[start:stop])
        )
        return moved

    def name(self, examples: Iterable[int]) -> str:
        """Describe which of all examples these are."""
        return self._whole.name(self._numbers[i] for i in examples)


def _layout(i: int, x: Any, y: Tensor) -> dict[str, Any]:
    try:
        return layout(x, y)
    except DataError as error:
        msg = f"Batch {i}: {error}"
        raise DataError(msg) from None


def check_batch(i: int, x: Any, y: Tensor) -> None:
    """Refuse a batch that is empty, has another number of targets than of inputs, or numbers that are not finite."""
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
                msg = f"Batch {i} holds NaN or Inf in its {what}{first_bad(leaf)}: clean the data first."
                raise DataError(msg)


def _difference(i: int, found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Describe how a batch differs from the earlier ones."""
    if list(found) != list(expected):
        return f"Batch {i} holds {', '.join(found)}, the earlier ones {', '.join(expected)}: pass batches of one kind."
    path = next(path for path in expected if found[path] != expected[path])
    got, wanted = found[path], expected[path]
    if isinstance(got, tuple) and isinstance(wanted, tuple):
        if got[1] != wanted[1]:
            return f"Batch {i} holds {path} of type {got[1]}, the earlier ones {wanted[1]}: convert all to one type."
        if isinstance(got[0], tuple):
            return (
                f"Batch {i} holds {path} of shape {got[0]} per example, the earlier ones {wanted[0]}: pad all to one "
                'shape (a tokenizer or collator that pads each batch by itself: padding="max_length").'
            )
        got, wanted = got[0], wanted[0]
    return (
        f"Batch {i} holds {got!r} as {path}, the earlier ones {wanted!r}: what has no entry for each example belongs "
        "to all of them, so pass a tensor with one entry per example, or the same in every batch."
    )
