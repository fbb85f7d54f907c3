"""The derivatives of a function of the parameters on all examples, as rows: held, formed again, or multiplied with."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.checks import check_rows
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import compare_modes, product_examples, pull_range, push_range
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.likelihoods import Likelihood
from nullbayes.linalg.held import HeldBlock, HeldRows, StreamedBlock
from nullbayes.linalg.matrix_free import ProductBlock
from nullbayes.linalg.pieces import Piece, normal_cost
from nullbayes.linalg.rows import Block, Rows
from nullbayes.types import RowFunction, Storage

Formed = Literal["form", "products"]
_COPIES = 6  # of a vector, while its products are in work


class JacobianRows(Rows):
    """Rows that are derivatives of a function of the parameters on each example.

    Parameters
    ----------
    network, examples, likelihood
        Whose derivatives, on which data.
    function : RowFunction
        ``(flat parameters, inputs, targets) -> (n, granule)``.
    granule : int
        Rows an example has.
    output_std : float
        How far the outputs themselves spread over the examples.
    n_outputs : int
        Outputs of an example.
    storage : "form" or "products"
        What a block is: its entries, formed when it is asked for; or two products, by JVP and VJP, that never form it.

    Notes
    -----
    Of :attr:`working_bytes`, rows formed in passing may take half, a block in one go or two parts of it at a time,
    and what is in memory only while they are formed a quarter, or more where few rows leave it; rows that are then held
    leave all of it to the latter.
    """

    n_counted: int  # rows that are not of ignored outputs
    output_stds: Tensor | None = None  # (O,) of each output by itself, where they are independent

    def __init__(
        self,
        network: Network,
        examples: Examples,
        likelihood: Likelihood,
        function: RowFunction,
        *,
        granule: int,
        output_std: float,
        n_outputs: int,
        storage: Formed = "form",
    ) -> None:
        if storage not in ("form", "products"):
            msg = f'storage must be "form" or "products", not {storage!r}; .keep() holds all rows.'
            raise SettingsError(msg)
        self.network, self.examples, self.likelihood, self.function = network, examples, likelihood, function
        self.granule, self.output_std, self.n_outputs = granule, output_std, n_outputs
        self.storage: Storage = storage
        self.n_rows, self.n_columns = len(examples) * granule, network.n_parameters
        self.dtype, self.device = network.dtype, network.device
        few = examples.read(0, min(3, len(examples)))
        self._layers = RowBuilder(network, function, *few)
        self._compared = torch.zeros(len(examples), dtype=torch.bool, device="cpu")
        probed, block = self._layers.probe(*few)
        compare_modes(network, probed, *few, block, needed=storage == "products")

    @property
    def route(self) -> str:
        """Say how the rows come about."""
        route = "jvp and vjp" if self.storage == "products" else self._layers.route
        if not self.network.forward_mode:
            route += "; predictions by rows as well"
        return f"{route}; in float32" if self.network.casts_to_float32 else route

    def block(self, start: int, stop: int) -> Block:
        """Return the rows of whole examples, formed at once, part by part, or never, as memory allows."""
        first, last, like = start // self.granule, stop // self.granule, self.network.theta[:0]
        if self.storage == "form":
            at_once = max(1, self.working_bytes // 2 // self._bytes_an_example)
            if last - first <= at_once:
                return self._held(first, last)
            ranges = self.examples.ranges(max(1, at_once // 2), first, last)
            parts = tuple(slice(a * self.granule - start, b * self.granule - start) for a, b in ranges)

            def form(part: slice) -> HeldBlock:
                return self._held((start + part.start) // self.granule, (start + part.stop) // self.granule)

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
        room = self._forming_room(self.working_bytes, (last - first) * self._bytes_an_example)
        pieces, n = self._form(first, last, room), (last - first) * self.granule
        return HeldBlock(pieces, n, self.n_columns, self.granule, self.network.theta[:0], self.working_bytes // 4)

    @property
    def walk_rows(self) -> int:
        """Rows of as many examples as may be formed at a time."""
        if self.storage == "products":
            return self._whole(8192)
        return self._whole(self.working_bytes // 4 // self._bytes_an_example * self.granule)

    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return the same rows, held in memory: factors for linear layers, entries for the rest."""
        place = torch.device("cpu") if host else self.device
        pieces = self._form(0, len(self.examples), self.working_bytes // (2 if half else 1), half=half, place=place)
        held = HeldRows(
            pieces, n_rows=self.n_rows, n_columns=self.n_columns, like=self.network.theta, granule=self.granule,
            block_rows=self.block_rows, reference=self if half else None,
        )  # fmt: skip
        held.working_bytes, held.spares_short_rows = self.working_bytes, self.spares_short_rows
        return held

    def stored(self, storage: Storage) -> Rows:
        """Return the same rows where a plan wants them."""
        if storage in ("form", "products"):
            other = copy.copy(self)
            other.storage = storage
            return other
        return self.keep(half=storage == "half", host=storage == "host")

    def on(self, examples: Examples) -> JacobianRows:
        """Return the rows of some of the examples, without looking at network and data again."""
        other = copy.copy(self)
        other.examples, other.n_rows, other._frobenius = examples, len(examples) * self.granule, None
        other._compared = torch.zeros(len(examples), dtype=torch.bool, device="cpu")
        return other

    def kept_bytes(self, *, half: bool = False) -> int:
        """Return the bytes that :meth:`keep` takes."""
        return sum((p.halved() if half else p).n_bytes() for p in self._example_pieces) * len(self.examples)

    def gram_cost(self) -> float:
        """Return the floating-point operations behind one entry of a Gram matrix."""
        return sum(piece.costs()[0] for piece in self._example_pieces)

    def product_cost(self) -> float:
        """Return the floating-point operations of one row times one vector."""
        return sum(piece.costs()[1] for piece in self._example_pieces)

    def normal_cost(self) -> float:
        """Return the floating-point operations of the normal matrix, summed over all rows."""
        factors = [f for piece in self._example_pieces for f in piece.factors(self.granule)]
        return normal_cost(factors) * len(self.examples)

    @property
    def _example_pieces(self) -> list[Piece]:
        """The pieces of one example, as shapes alone: what is held of it, and what products cost."""
        return self._layers.example_pieces

    @property
    def held_numbers(self) -> int:
        """How many numbers stand for a row where it is held."""
        return max(1, self._bytes_an_example // self.granule // self.dtype.itemsize)

    def product_bytes(self, storage: Storage, n_vectors: int) -> float:
        """Return the bytes a row that products with so many vectors take for a moment."""
        pieces = [piece.halved() for piece in self._example_pieces] if storage == "half" else self._example_pieces
        return max(piece.product_bytes(n_vectors) for piece in pieces)

    def least_working_bytes(self, storage: Storage, n_vectors: int) -> int:
        """Return the least working bytes: for one example at a time."""
        if storage == "products":
            return max(2**16, n_vectors * self._pushed_bytes + _COPIES * self.n_columns * self.dtype.itemsize)
        return max(2**16, (4 if storage == "form" else 2) * max(self._layers.example_bytes, self._bytes_an_example))

    def forming_bytes(self, storage: Storage, working_bytes: int) -> int:
        """Return how much of the working bytes is needed to form rows that are then held."""
        if storage in ("form", "products"):
            return 0
        an_example = self._layers.example_bytes * (2 if storage == "half" else 1)
        return max(an_example, min(working_bytes // an_example, len(self.examples)) * an_example)

    def forming_chunks(self, storage: Storage, working_bytes: int) -> int:
        """Return in how many chunks the rows are formed, once."""
        share = {"half": 2, "form": 4}.get(storage, 1)
        return -(-len(self.examples) // max(1, working_bytes // share // self._layers.example_bytes))

    def passing_bytes(self, storage: Storage, working_bytes: int, block_rows: int, n_vectors: int) -> tuple[int, int]:
        """Return how much of the working bytes the Gram matrix of a block takes, and products with it."""
        if storage == "products":
            vector = _COPIES * self.n_columns * self.dtype.itemsize
            pushed = min(working_bytes, max(n_vectors, 256) * self._pushed_bytes)
            return min(working_bytes, min(block_rows, working_bytes // vector) * vector + pushed), pushed
        gram, products = super().passing_bytes(
            storage, working_bytes // (4 if storage == "form" else 1), block_rows, n_vectors
        )
        block = block_rows // self.granule
        if storage == "form":
            gram += self._formed_bytes(working_bytes, block)
            products += self._formed_bytes(working_bytes, max(block, len(self.examples)))  # to measure the residual
        if storage == "half":  # the result is measured on rows formed anew
            products = max(products, self._formed_bytes(working_bytes, len(self.examples)))
        return gram, products

    def _formed_bytes(self, working_bytes: int, n_examples: int) -> int:
        """Return what the rows of so many examples take where they are formed in passing."""
        rows, share = min(working_bytes // 2, n_examples * self._bytes_an_example), self._layers.example_bytes
        at_once = max(1, rows // self._bytes_an_example)
        return rows + max(share, min(self._forming_room(working_bytes, rows), at_once * share))

    @staticmethod
    def _forming_room(working_bytes: int, row_bytes: int) -> int:
        """Return what may be in memory while so many bytes of rows are formed: a quarter, or what few rows leave."""
        return max(working_bytes // 4, working_bytes - working_bytes // 4 - 2 * row_bytes)

    @property
    def _pushed_bytes(self) -> int:
        """What one example times one vector takes by JVP or VJP."""
        return 2 * self._layers.example_bytes // self.granule

    @property
    def _bytes_an_example(self) -> int:
        return max(1, sum(piece.n_bytes() for piece in self._example_pieces))

    def _pieces(self, start: int, stop: int) -> list[Piece]:
        """Form the rows of some examples, compared with plain differentiation the first time."""
        x, y = self.examples.read(start, stop)
        if self._compared[start:stop].all():
            return self._layers.pieces(x, y)
        pieces = self._layers.checked(x, y)[1]
        self._compared[start:stop] = True
        return pieces

    def _form(
        self, first: int, last: int, room: int, *, half: bool = False, place: torch.device | None = None
    ) -> tuple[Piece, ...]:
        """Form the rows of a range of examples, as many at a time as there is room, into tensors of the final size."""
        whole: list[Piece] = []
        route = self._layers.route
        most = max(1, room // self._layers.example_bytes)
        even = -(-(last - first) // -(-(last - first) // most))  # a small rest would cost as much as a whole chunk
        for start, stop in self.examples.ranges(even, first, last):
            part = self._pieces(start, stop)
            if whole and self._layers.route != route:  # what is there was formed by another
                return self._form(first, last, room, half=half, place=place)
            check_rows(self.examples, start, stop, [tensor for piece in part for tensor in piece.tensors()])
            if half:
                part = [piece.halved() for piece in part]
            if not whole:
                whole = [piece.allocate((last - first) * self.granule, place or self.device) for piece in part]
            rows = slice((start - first) * self.granule, (stop - first) * self.granule)
            for target, piece in zip(whole, part, strict=True):
                target.take(rows).fill(piece)
        return tuple(whole)

    def product_examples(self, n_vectors: int) -> int:
        """Return how many examples to take through products with so many vectors in one go."""
        return product_examples(self.device, n_vectors, self.working_bytes // self._pushed_bytes)

    def examples_within(self, n_vectors: int) -> int:
        """Return how many examples times so many vectors the working bytes hold."""
        return max(1, self.working_bytes // self._pushed_bytes // n_vectors)

    def _chunks(self, n_vectors: int, first: int, last: int) -> Iterable[tuple[int, int]]:
        return self.examples.ranges(self.product_examples(n_vectors), first, last)

    def _push(self, vectors: Tensor, first: int, last: int) -> Tensor:  # (S, P) -> (S, m)
        parts = [
            push_range(self.function, self.network.theta, self.examples, a, b, vectors).flatten(1)
            for a, b in self._chunks(len(vectors), first, last)
        ]
        return torch.cat(parts, dim=1)

    def _pull(self, weights: Tensor, first: int, last: int) -> Tensor:  # (S, m) -> (S, P)
        weights = weights.reshape(len(weights), last - first, self.granule)
        result = weights.new_zeros(len(weights), self.n_columns)
        for a, b in self._chunks(len(weights), first, last):
            part = weights[:, a - first : b - first]
            result += pull_range(self.function, self.network.theta, self.examples, a, b, part)
        return result
