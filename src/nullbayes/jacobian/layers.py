r"""Rows by layers: one forward pass, and derivatives of each output, give all rows of a range of examples.

For a linear layer :math:`z = W a + b` the row of output :math:`o` is :math:`\partial f_o/\partial z \; a^\top`; for a
convolution it is a sum of such products over the positions; ``layer_rules`` has a rule for each type of layer. Layers
seen once in the forward pass are covered this way; the row of a weight that several of them share, such as a tied
embedding, is the sum of their shares. What remains is differentiated by ``vmap``. Nothing is taken on trust: rows are
compared with plain differentiation, and if they differ, everything goes by ``vmap``; if those differ too, example by
example.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import as_batch, example_dims, map_leaves, take_examples
from nullbayes.jacobian.comparison import (
    CHUNK_TOLERANCE,
    COUPLED,
    Plain,
    gradients,
    many_gradients,
    ordinary,
    recording,
)
from nullbayes.jacobian.found_layers import Layer, find_layers, with_all_uses
from nullbayes.jacobian.layer_rules import summed
from nullbayes.jacobian.narrowed import Narrowed
from nullbayes.jacobian.network import Network
from nullbayes.linalg.held import HeldBlock
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece
from nullbayes.memory import is_out_of_memory
from nullbayes.precision import differentiable, full_precision
from nullbayes.types import RowFunction

_CHECKED_EXAMPLES = 3
_OUTPUTS_AT_ONCE = 32  # in one backward pass on a CPU: more is no faster
_WORKING_BYTES = {"cpu": 2**28, "cuda": 2**32}  # of what is in memory only while rows are formed for predictions


@dataclass(frozen=True)
class Captured:
    """What a forward pass and the backward passes left behind."""

    values: Tensor  # (n, O)
    layers: dict[str, tuple[Tensor, Tensor]]  # name -> inputs (n, ...), gradients (n, O, ...)


class LayerRows:
    """Forms the rows of a range of examples, by layers where that is possible.

    Parameters
    ----------
    network : Network
        The function of the parameters.
    function : RowFunction
        ``(flat parameters, inputs, targets) -> (n, O)``: what the rows are the derivatives of.
    x, y
        A few examples, to see which layers are called and to check the rows.

    Notes
    -----
    The route is found out, and rows are compared for the first time, with at most 16 outputs: of a function that has
    more, with random combinations of them all. So the time does not grow with the outputs of an example.
    """

    @full_precision()
    def __init__(self, network: Network, function: RowFunction, x: Any, y: Tensor) -> None:
        self.network = network
        self._narrow = narrow = Narrowed(function)
        self.function: RowFunction = narrow
        self.working_bytes = _WORKING_BYTES.get(network.device.type, 2**28)
        self._vmap = self._one_for_all = self._batched = self._shared = True  # until it is seen to fail
        self._turns, self._asked = 0, dict[str, tuple[int, int]]()  # by way: inputs so far, and when last compared
        self.at_once = True  # whether torch maps its derivatives over outputs, until it is seen to fail
        self._owned = sum(parameter.numel() for parameter in network.module.parameters())
        few, y = take_examples(x, 0, _CHECKED_EXAMPLES), y[:_CHECKED_EXAMPLES]
        try:
            seen = self._capture(find_layers(network), few, y)
        except RuntimeError as error:  # what all examples share has a place of its own; other faults show below
            if is_out_of_memory(error):
                raise
            self._shared = False
            seen = self._capture(find_layers(network), few, y)
        self.layers = with_all_uses(layer for layer in find_layers(network) if layer.name in seen.layers)
        self.rest = self._uncovered()
        self.width = narrow.width
        formed = {layer: layer.pieces(*seen.layers[layer.name]) for layer in self.layers}
        if self.layers and not self._worthwhile(formed):
            self._take_plainer()
        made = self.checked(few, y, torch.finfo(network.dtype).eps ** 0.6)[1]
        self.function, self.width = function, narrow.outputs  # O
        self.example_pieces = [piece.outline(self.width) for piece in made]
        formed = formed if self.layers else {}
        self.operations = self._count_operations(seen)
        self.example_bytes = self._count_bytes(seen, formed, self._count_saved(few, y) if self.rest else 0)

    @property
    def route(self) -> str:
        """Say how rows are formed."""
        if not self.layers:
            return "vmap(jacrev)" if self._vmap else "example by example"
        covered = self.network.n_parameters - sum(stop - start for start, stop in self.rest)
        return f"by layers ({covered / self.network.n_parameters:.0%} of the parameters)"

    @property
    def examples_at_a_time(self) -> int:
        """Return how many examples to form rows of in one go, by the memory that takes beside the rows."""
        return max(1, self.working_bytes // self.example_bytes)

    @property
    def fits(self) -> bool:
        """Whether the rows of an example can be formed in the memory that is meant for it."""
        return self.example_bytes <= self.working_bytes

    @property
    def whole(self) -> bool:
        """Whether the rows go by layers, and these are all that the network has of parameters."""
        owned = sum(parameter.numel() for layer in self.layers for parameter in layer.module.parameters())
        return bool(self.layers) and not self.rest and owned == self._owned

    def is_due(self, way: str, n: int, first: int, one_in: int) -> bool:
        """Whether rows of ``n`` more inputs, formed in a way, should be compared: the first, then one in so many."""
        asked, last = self._asked.get(way, (0, 0))
        due = asked < first or asked + n - last >= one_in
        self._asked[way] = asked + n, asked + n if due else last
        return due

    def pieces(self, x: Any, y: Tensor) -> list[Piece]:
        """Form the rows of some examples."""
        return self.form(x, y)[1] if self.layers else self._rest_pieces(x, y)

    @full_precision()
    def checked(
        self, x: Any, y: Tensor, tolerance: float = CHUNK_TOLERANCE, *, few: int | None = None
    ) -> tuple[Tensor, list[Piece]]:
        """Return the values (n, O) of the function on some examples, and their rows, compared with autograd.

        Of all examples (and some are looked at alone), or of a ``few`` that take turns and, where those differ, of all
        after all: a GPU has other kernels for batches of another size, which round otherwise, and a ReLU at zero then
        goes the other way. Where all differ, the next plainer route is taken, from then on.
        """
        size = min(len(y), few or len(y))
        start = 7919 * self._turns % (len(y) - size + 1)
        self._turns += 1
        plain = Plain(self.network, self.function, x, y, start, start + size)
        if few is None:
            plain.check_alone()
        while True:
            with contextlib.suppress(LayersDiffer):
                values, made = self.form(x, y)
                allowed = tolerance if self.layers or self._vmap else max(tolerance, CHUNK_TOLERANCE)
                if plain.agrees(values, made, allowed):
                    return values, made
            if size < len(y):
                size = len(y)
                plain = Plain(self.network, self.function, x, y, 0, size)
                plain.check_alone()
            else:
                self._take_plainer()

    def probe(self, x: Any, y: Tensor) -> tuple[RowFunction, HeldBlock]:
        """Return a function with few outputs, as combinations of all, and its rows on some examples."""
        other = copy.copy(self)
        other.function, other.width = self._narrow, self._narrow.width
        pieces = tuple(other.pieces(x, y))
        return self._narrow, HeldBlock(
            pieces, len(y) * other.width, self.network.n_parameters, other.width, self.network.theta
        )

    def _take_plainer(self) -> None:
        """Take the next route: by layers, by vmap, example by example."""
        if self.layers:
            self.layers = ()
            self.rest = self._uncovered()
        elif self._vmap:  # torch maps the derivatives of some operations wrongly over examples
            self._vmap = False
        else:
            raise ModelError(COUPLED)

    @full_precision()
    def form(self, x: Any, y: Tensor) -> tuple[Tensor, list[Piece]]:
        """Return the values (n, O) of the function on some examples, and their rows."""
        seen = self._capture(self.layers, x, y)
        if any(layer.name not in seen.layers for layer in self.layers):
            raise LayersDiffer
        result: list[Piece] = []
        for layer in self.layers:
            result += layer.pieces(*seen.layers.pop(layer.name))
        return seen.values, summed(result) + self._rest_pieces(x, y)

    def _rest_pieces(self, x: Any, y: Tensor) -> list[Piece]:
        if not self.rest:
            return []
        widths = [stop - start for start, stop in self.rest]
        parts = self.plain(x, y, self.rest).split(widths, dim=1)
        return [DensePiece(entries, start) for entries, (start, _) in zip(parts, self.rest, strict=True)]

    def plain(self, x: Any, y: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:  # (m, c)
        """Differentiate example by example with respect to some columns."""
        theta = self.network.theta
        inside = torch.cat([theta[start:stop] for start, stop in ranges])
        dims = example_dims(x)

        def one(values: Tensor, xi: Any, yi: Tensor) -> Tensor:  # (O,)
            parts, edge, offset = [], 0, 0
            for start, stop in ranges:
                parts += [theta[edge:start], values[offset : offset + stop - start]]
                edge, offset = stop, offset + stop - start
            flat = torch.cat([*parts, theta[edge:]])
            return self.function(flat, as_batch(xi, dims), yi[None])[0]

        if self._vmap:
            try:
                return self._mapped(one, inside, x, y).reshape(-1, len(inside))
            except RuntimeError as error:  # an operation that vmap does not know; what is wrong otherwise shows below
                if is_out_of_memory(error):
                    raise
                self._vmap = False
        rows = []
        with recording():
            inside, x, y = map_leaves(ordinary, (inside, x, y))
            inside = inside.clone().requires_grad_()
            for i in range(len(y)):
                values = one(inside, map_leaves(lambda leaf, dim, i=i: leaf if dim is None else leaf[i], x, dims), y[i])
                rows += [gradients(value, [inside])[0] for value in values]
        return torch.stack(rows)

    def _mapped(self, one: Callable[..., Tensor], values: Tensor, x: Any, y: Tensor) -> Tensor:  # (n, O, c) or (n, c)
        """Differentiate one example's function for all of them at once."""
        # one output needs no map over outputs, which would cost as much again
        rows_of, dims = grad(lambda *args: one(*args)[0]) if self.width == 1 else jacrev(one), example_dims(x)
        with torch.no_grad(), differentiable():
            if self._one_for_all:
                try:
                    together: Tensor = vmap(rows_of, in_dims=(None, dims, 0))(values, x, y)
                except RuntimeError as error:  # adding an example's own to what all share, in place, as LSTM and GRU do
                    if is_out_of_memory(error):
                        raise
                    self._one_for_all = False
                else:
                    return together
            each: Tensor = vmap(rows_of, in_dims=(0, dims, 0))(values.expand(len(y), -1), x, y)
            return each

    def _uncovered(self) -> tuple[tuple[int, int], ...]:
        covered = sorted(
            (start, start + layer.module.get_parameter(name).numel())
            for layer in self.layers
            for name, start in layer.columns.items()
        )
        gaps, edge = [], 0
        for start, stop in [*covered, (self.network.n_parameters, self.network.n_parameters)]:
            if start > edge:
                gaps.append((edge, start))
            edge = stop
        return tuple(gaps)

    def _worthwhile(self, formed: Mapping[Layer, list[Piece]]) -> bool:
        """Whether two ways through the network, one by layers and one for the rest, are better than the plain one.

        The plain way forms all rows at nearly the cost of some; what speaks for layers then is that factors are
        held instead of entries.
        """
        factored = sum(
            layer.n_parameters for layer, made in formed.items() if any(isinstance(piece, OuterPiece) for piece in made)
        )
        return not self.rest or 2 * factored >= self.network.n_parameters

    def _count_bytes(self, seen: Captured, formed: Mapping[Layer, list[Piece]], saved: int) -> int:
        """Estimate what forming the rows of an example takes in memory.

        First the graph of the forward pass and all gradients, twice while they are stacked; then what is left of them,
        the patches of one layer, and the entries of the layers so far.
        """
        n, times = len(seen.values), self.width / self._narrow.width
        sizes = {}  # of an example: inputs, and gradients of all outputs
        for layer in formed:
            inputs, gradients = seen.layers[layer.name]
            sizes[layer] = inputs.numel() / n, times * gradients.numel() / n
        left = sum(inputs + gradients for inputs, gradients in sizes.values())
        graph = sum(3 * gradients / self.width for _, gradients in sizes.values())
        numbers, entries = left + graph + sum(gradients for _, gradients in sizes.values()), 0.0
        for layer, made in formed.items():
            n_inputs, n_gradients = sizes[layer]
            parameter = layer.module.get_parameter(next(iter(layer.columns)))
            patches = n_gradients / self.width / len(parameter) * parameter[0].numel()
            entries += sum(tensor.numel() for piece in made for tensor in piece.outline(self.width).tensors())
            numbers = max(numbers, left + patches + entries)
            left -= n_inputs + n_gradients
        if self.rest:  # the plain way: what it saves on the way forward, and its rows, thrice while they are joined
            columns = sum(stop - start for start, stop in self.rest)
            copies = 3 * self.width + (0 if self._one_for_all else 2)
            numbers = max(numbers, saved / n + copies * columns)
        return max(1, math.ceil(numbers * self.network.dtype.itemsize))

    def _count_operations(self, seen: Captured) -> int:
        """Estimate the products of numbers that a forward pass of an example takes in its layers."""
        total = 0
        for layer in self.layers:
            parameter = layer.module.get_parameter(next(iter(layer.columns)))
            total += seen.layers[layer.name][1].numel() * parameter[0].numel()
        return total // seen.values.numel()

    def _count_saved(self, x: Any, y: Tensor) -> int:
        """Count the numbers that differentiation holds between its passes, beside the parameters."""
        held: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with recording(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), self.network.lock:
            theta = self.network.theta.clone().requires_grad_()
            self.function(theta, *map_leaves(ordinary, (x, y)))
        held.pop(theta.untyped_storage().data_ptr(), None)
        return sum(held.values())

    @full_precision()
    def _capture(self, layers: tuple[Layer, ...], x: Any, y: Tensor) -> Captured:
        """Run forward and backward, and keep what the layers saw that were called once, with examples first."""

        def evaluate() -> Tensor:
            theta = self.network.theta.clone().requires_grad_()
            return self.function(theta, *map_leaves(ordinary, (x, y)))

        values, once = self.watch(layers, len(y), evaluate)
        gradients = self._backward(values, [output for _, output in once.values()])
        kept = {name: (inputs, g) for (name, (inputs, _)), g in zip(once.items(), gradients, strict=True)}
        return Captured(values.detach(), kept)

    def watch(
        self, layers: tuple[Layer, ...], n: int, evaluate: Callable[[], Tensor]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the values (n, O), and inputs and outputs of the layers that were called once, with examples first."""
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in layers}

        def watcher(name: str) -> Any:
            def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
                inputs = (args[0] if args else kwargs["input"]).detach()
                if self._shared and len(inputs) == len(output) == 1:  # as of positions: each example has a share
                    inputs = inputs.expand(n, *inputs.shape[1:])
                    output = output.expand(n, *output.shape[1:])
                calls[name].append((inputs, output))
                return output.clone()  # what follows may change its input in place

            return hook

        with recording(), self.network.lock:
            handles = [layer.module.register_forward_hook(watcher(layer.name), with_kwargs=True) for layer in layers]
            try:
                values = evaluate()
            finally:
                for handle in handles:
                    handle.remove()
        once = {
            name: called[0]
            for name, called in calls.items()
            if len(called) == 1 and called[0][1].requires_grad and len(called[0][0]) == len(called[0][1]) == len(values)
        }
        return values, once

    def _backward(self, values: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        """Return the derivatives (n, O, ...) of every value with respect to what the layers put out."""
        if not outputs:
            return []
        with recording():
            summed = values.sum(0)  # examples do not influence each other
            at_once = len(summed) if values.is_cuda else _OUTPUTS_AT_ONCE
            if self._batched and (values.is_cuda or len(summed) > at_once // 2):  # else small operations take turns
                try:
                    with differentiable():
                        return [found.transpose(0, 1) for found in many_gradients(summed, outputs, at_once)]
                except RuntimeError as error:  # an operation whose derivative vmap does not know
                    if is_out_of_memory(error):
                        raise
                    self._batched = False
            passes = [gradients(value, outputs) for value in summed]
        return [torch.stack(parts, dim=1) for parts in zip(*passes, strict=True)]


class LayersDiffer(Exception):
    """A layer that was called once for the first examples was not for others: their rows need a plainer route."""
