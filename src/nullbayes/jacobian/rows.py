"""The derivatives of a function of the parameters on all examples as rows: held, formed again, or matrix-free."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.checks import check_rows, seem_finite
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network, RowFunction
from nullbayes.jacobian.products import compare_modes, product_examples, pull, push
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.likelihoods import Likelihood
from nullbayes.limits import OutOfMemory, RowCosts, Storage, attempt, forming_room, limits, pushed_bytes
from nullbayes.linalg.held import HeldBlock, HeldRows, StreamedBlock
from nullbayes.linalg.matrix_free import ProductBlock
from nullbayes.linalg.pieces import Piece, normal_flops
from nullbayes.linalg.rows import Block, Rows

Formed = Literal["recompute", "matrix_free"]


class JacobianRows(Rows):
    """Rows that are derivatives of a function of the parameters on each example.

    Parameters
    ----------
    network, examples, likelihood
        The network whose derivatives these are, and the data.
    function : RowFunction
        ``(flat parameters, inputs, targets) -> (n, rows_per_example)``.
    rows_per_example : int
        Rows per example.
    output_std : float
        Standard deviation of the outputs over the examples.
    n_outputs : int
        Outputs per example.
    storage : "recompute" or "matrix_free"
        What a block is: its entries, formed whenever they are needed, or two products, by JVP and VJP, that never form
        it. :class:`RowCosts <nullbayes.limits.RowCosts>` says how both share the :attr:`working_bytes`.
    """

    n_counted: int  # rows without those of ignored outputs
    output_stds: Tensor | None = None  # (O,) per output, where outputs are independent

    def __init__(
        self,
        network: Network,
        examples: Examples,
        likelihood: Likelihood,
        function: RowFunction,
        *,
        rows_per_example: int,
        output_std: float,
        n_outputs: int,
        storage: Formed = "recompute",
    ) -> None:
        if storage not in ("recompute", "matrix_free"):
            msg = f'storage must be "recompute" or "matrix_free", not {storage!r}; .keep() holds all rows.'
            raise SettingsError(msg)
        self.network, self.examples, self.likelihood, self.function = network, examples, likelihood, function
        self.rows_per_example, self.output_std, self.n_outputs = rows_per_example, output_std, n_outputs
        self.storage: Storage = storage
        self.n_rows, self.n_columns = len(examples) * rows_per_example, network.n_parameters
        self.dtype, self.device = network.dtype, network.device
        few = examples.read(0, min(3, len(examples)))
        self._layers = RowBuilder(network, function, *few)
        self._row_bytes = max(1, sum(piece.costs().n_bytes for piece in self._layers.example_pieces))  # per example
        self._at_once = len(examples)  # as many as were ever formed together without running out of memory
        self._compared = torch.zeros(len(examples), dtype=torch.bool, device="cpu")
        compare_modes(self._layers, *few, needed=storage == "matrix_free")

    @property
    def route(self) -> str:
        """Say how the rows are computed."""
        route = "jvp and vjp" if self.storage == "matrix_free" else self._layers.route
        if not self.network.forward_mode:
            route += "; predictions by rows as well"
        return f"{route}; in float32" if self.network.casts_to_float32 else route

    def block(self, start: int, stop: int) -> Block:
        """Return the rows of whole examples: formed at once or part by part, as memory allows, or matrix-free."""
        each, like = self.rows_per_example, self.network.theta[:0]
        first, last = start // each, stop // each
        if self.storage == "recompute":
            at_once = max(1, self.working_bytes // 2 // self._row_bytes)
            if last - first <= at_once:
                return self._held(first, last)
            ranges = self.examples.ranges(max(1, at_once // 2), first, last)
            parts = tuple(slice(a * each - start, b * each - start) for a, b in ranges)

            def form(part: slice) -> HeldBlock:
                return self._held((start + part.start) // each, (start + part.stop) // each)

            return StreamedBlock(parts, form, stop - start, like)
        return ProductBlock(
            n_rows=stop - start,
            n_columns=self.n_columns,
            forward=lambda vectors: self._push(vectors, first, last),
            transposed=lambda vectors: self._pull(vectors, first, last),
            like=like,
            working_bytes=self.working_bytes,
        )

    def _held(self, first: int, last: int) -> HeldBlock:
        room = forming_room(self.working_bytes, (last - first) * self._row_bytes)
        pieces, each = self._form(first, last, room), self.rows_per_example
        like, n_rows = self.network.theta[:0], (last - first) * each
        return HeldBlock(pieces, n_rows, self.n_columns, each, like, self.working_bytes // 4)

    @property
    def rows_per_pass(self) -> int:
        """Rows to multiply at a time in a pass over all of them: those of as many examples as may be formed."""
        if self.storage == "matrix_free":
            return self._round_to_examples(limits(self.device).matrix_free_rows)
        return self._round_to_examples(self.working_bytes // 4 // self._row_bytes * self.rows_per_example)

    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return the same rows held in memory: factors for linear layers, entries for the rest."""
        place = torch.device("cpu") if host else self.device
        pieces = self._form(0, len(self.examples), self.working_bytes // (2 if half else 1), half=half, place=place)
        held = HeldRows(
            pieces,
            n_rows=self.n_rows,
            n_columns=self.n_columns,
            like=self.network.theta,
            rows_per_example=self.rows_per_example,
            block_rows=self.block_rows,
            reference=self if half else None,
        )
        held.working_bytes, held.spares_short_rows = self.working_bytes, self.spares_short_rows
        return held

    def stored(self, storage: Storage) -> Rows:
        """Return the same rows, stored as a plan says; together with those of other processes, if there are any."""
        own: Rows
        if storage in ("recompute", "matrix_free") or not len(self.examples):
            own = formed = copy.copy(self)
            formed.storage = storage
        else:
            own = self._compacted() if storage == "factors" else self
            own = own.keep(half=storage == "half", host=storage == "host")
        division = self.network.division
        return self.examples.joined(own) if division is None else division.joined(own)

    def _compacted(self) -> JacobianRows:
        """Return the same rows, which are then held as factors where that takes less memory."""
        other = copy.copy(self)
        other._layers = self._layers.compacted()
        return other

    def on(self, examples: Examples) -> JacobianRows:
        """Return the rows of some of the examples, without looking at network and data again."""
        other = copy.copy(self)
        other.examples, other.n_rows, other._frobenius = examples, len(examples) * self.rows_per_example, None
        other._compared = torch.zeros(len(examples), dtype=torch.bool, device="cpu")
        return other

    def within(self, working_bytes: int) -> JacobianRows:
        """Return the same rows, which work within so much memory."""
        other = copy.copy(self)
        other.working_bytes = working_bytes
        return other

    def costs(self, storage: Storage = "device") -> RowCosts:
        """Return what the rows cost where they are stored that way; of several processes, in the one that has most."""
        outlines, n = self._layers.example_pieces, self.examples.n_most
        stored = [piece.halved() for piece in outlines] if storage == "half" else outlines
        smaller = self._layers.compact_pieces
        pieces = tuple(piece.costs() for piece in (smaller if storage == "factors" else stored))
        held = 0 if storage in ("recompute", "matrix_free") else n * sum(piece.n_bytes for piece in pieces)
        factors = [f for piece in outlines for f in piece.factors(self.rows_per_example)]
        own = RowCosts(
            n * self.rows_per_example,
            *self._shape[1:],
            storage=storage,
            pieces=pieces,
            full_bytes=n * self._row_bytes,
            held_bytes=held,
            normal_flops=n * normal_flops(factors),
            example_bytes=self._layers.example_bytes,
            example_flops=self._layers.example_flops,
            processes=self.examples.group.size,
            all_rows=self.examples.n_all * self.rows_per_example,
            compact_bytes=n * sum(p.costs().n_bytes for p in smaller) if any(p.compact for p in smaller) else 0,
        )
        return own if self.network.division is None else self.network.division.heaviest(own)

    @property
    def numbers_per_row(self) -> int:
        """Stored numbers per row."""
        return max(1, self._row_bytes // self.rows_per_example // self.dtype.itemsize)

    @property
    def _pushed_bytes(self) -> int:
        return pushed_bytes(self._layers.example_bytes, self.rows_per_example)

    def _pieces(self, start: int, stop: int) -> list[Piece]:
        """Form the rows of some examples, compared with those of plain automatic differentiation the first time."""
        x, y = self.examples.read(start, stop)
        if self._compared[start:stop].all():
            return self._layers.pieces(x, y)
        pieces = self._layers.checked(x, y)[1]
        self._compared[start:stop] = True
        return pieces

    def _form(
        self, first: int, last: int, room: int, *, half: bool = False, place: torch.device | None = None
    ) -> tuple[Piece, ...]:
        """Form the rows of a range of examples, as many at a time as fit in ``room`` bytes."""
        whole: list[Piece] = []
        route = self._layers.route
        most = max(1, min(self._at_once, room // self._layers.example_bytes))
        even = -(-(last - first) // -(-(last - first) // most))  # a small remainder would cost as much as a whole chunk
        for start, stop, part in self._parts(self.examples.ranges(even, first, last)):
            if whole and self._layers.route != route:  # the first chunks were formed by another
                return self._form(first, last, room, half=half, place=place)
            check_rows(self.examples, start, stop, [tensor for piece in part for tensor in piece.tensors()])
            if half:
                part = [piece.halved() for piece in part]
            if not whole:
                whole = [piece.allocate((last - first) * self.rows_per_example, place or self.device) for piece in part]
            rows = slice((start - first) * self.rows_per_example, (stop - first) * self.rows_per_example)
            whole = [target.widened(piece) for target, piece in zip(whole, part, strict=True)]
            for target, piece in zip(whole, part, strict=True):
                target.take(rows).fill(piece)
        return tuple(whole)

    def _parts(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, list[Piece]]]:
        """Form rows range by range; a range for which memory is too small is halved, and so are those of later passes.

        What a network needs inside, before the layers whose parameters vary, is not known in advance.
        """
        left = deque(ranges)
        while left:
            start, stop = left.popleft()
            found = attempt(partial(self._pieces, start, stop))
            if not isinstance(found, OutOfMemory):
                yield start, stop, found
                del found
            elif stop - start == 1:
                raise found.error
            else:
                self._at_once = half = (stop - start) // 2
                left.extendleft([(start + half, stop), (start, start + half)])

    def examples_within(self, n_vectors: int) -> int:
        """Return how many examples forward mode may take with ``n_vectors`` vectors each, in every process."""
        return min(self.network.group.gather(max(1, self.working_bytes // self._layers.pushed_bytes // n_vectors)))

    def _chunks(self, n_vectors: int, first: int, last: int) -> Iterable[tuple[int, int]]:
        most = product_examples(self.device, n_vectors, self.working_bytes // self._pushed_bytes)
        return self.examples.ranges(most, first, last)

    def _push(self, vectors: Tensor, first: int, last: int) -> Tensor:  # (S, P) -> (S, m)
        """Multiply with the rows of a range of examples, by forward mode."""
        parts = []
        for a, b in self._chunks(len(vectors), first, last):
            pushed = push(self.function, self.network.theta, *self.examples.read(a, b), vectors)
            if not seem_finite([pushed]) and torch.isfinite(vectors).all():
                check_rows(self.examples, a, b, [pushed.transpose(0, 1)])
            parts.append(pushed.flatten(1))
        return torch.cat(parts, dim=1)

    def _pull(self, weights: Tensor, first: int, last: int) -> Tensor:  # (S, m) -> (S, P)
        """Multiply with the transpose of the rows of a range of examples, by reverse mode."""
        weights = weights.reshape(len(weights), last - first, self.rows_per_example)
        result, theta = weights.new_zeros(len(weights), self.n_columns), self.network.theta
        for a, b in self._chunks(len(weights), first, last):
            part = weights[:, a - first : b - first]
            pulled = pull(self.function, theta, *self.examples.read(a, b), part)
            if not seem_finite([pulled]) and torch.isfinite(part).all():
                for i in range(b - a):  # the sum over the examples does not say which
                    alone = pull(self.function, theta, *self.examples.read(a + i, a + i + 1), part[:, i : i + 1])
                    check_rows(self.examples, a + i, a + i + 1, [alone[None]])
            result += pulled
        return result
