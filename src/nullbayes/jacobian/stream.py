"""Batches of a loader, read again and again: in order, one pass a sweep, with few of them in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import DataError
from nullbayes.jacobian.batches import leaves

Batch = tuple[Any, Tensor]


def batch_bytes(x: Any, y: Tensor) -> int:
    """Return the bytes of a batch."""
    return sum(leaf.numel() * leaf.element_size() for leaf in (*leaves(x), y))


class Stream:
    """The batches of a loader, by number.

    Going on reads on; going back, beyond what is still held, begins anew. The first batch is always held: what is
    looked at to find out about the network lies there.

    Parameters
    ----------
    loader : iterable of batches
        Read again for each pass.
    n_batches : int
        How many it must have.
    held_bytes : int
        How much may be held of what was read, so that a block which is looked at twice is read once.
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
        """Leave out the pass that is under way: a copy begins its own."""
        return {key: getattr(self, key) for key in ("_loader", "_n", "_held_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what another reads, from the beginning."""
        Stream.__init__(self, *state.values())

    def read(self, first: int, last: int, split: Callable[[int, Any], Batch]) -> list[Batch]:
        """Return batches ``first`` to ``last``, both included.

        ``split(number, batch)`` takes them apart, and refuses those that differ from the first time. It is not held:
        whoever reads is then gone with the last reference to it, and so are the workers of the pass under way.
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
        """Let go of batches before a number, while they are too many."""
        while self._window and self._next - len(self._window) < keep_from and self._bytes > self._held_bytes:
            self._bytes -= self._window.popleft()[1]

    def _advance(self, split: Callable[[int, Any], Batch]) -> None:
        number = self._next
        if self._iterator is None:
            with torch.random.fork_rng(devices=()):  # a DataLoader draws a seed: samples must not depend on passes
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
        if self._next == self._n:  # all of them: ask once more, which ends its workers
            iterator, self._iterator = self._iterator, None
            if next(iterator, self) is not self:
                self._rewind()
                msg = (
                    f"The loader yields more than the {self._n} batches that it yielded at first: it must yield the "
                    "same data whenever it is read."
                )
                raise DataError(msg)
