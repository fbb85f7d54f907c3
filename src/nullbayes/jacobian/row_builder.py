r"""Rows of some examples, by the first of the three routes that gives the right ones.

Nothing is taken on trust: rows are compared with plain differentiation. Where they differ, or torch cannot carry out a
route, the next one is taken from then on, and the reason is kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import as_batch, example_dims, map_leaves, ordinary, take_examples
from nullbayes.jacobian.checks import CHUNK_TOLERANCE, COUPLED, AutogradReference
from nullbayes.jacobian.layer_rules import Layer, summed
from nullbayes.jacobian.network import Network, RowFunction
from nullbayes.jacobian.routes import Attempts, ByLayers, ByVmap, FormedRows, OneByOne, Range, Seen
from nullbayes.limits import limits
from nullbayes.linalg.held import HeldBlock
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece
from nullbayes.precision import full_precision, recording

_CHECKED_EXAMPLES = 3
_COMPARED_OUTPUTS = 16  # more outputs are combined into so many before rows are compared for the first time


class _FewOutputs:
    """A function of few outputs: the given one if it has at most 16, else 16 random combinations of all its outputs.

    What holds for the combinations holds for every output, because each is part of all of them.
    """

    def __init__(self, function: RowFunction) -> None:
        self.function = function
        self.n_outputs = 0  # O, once the function was called
        self._weights: Tensor | None = None  # (O, 16)

    def __call__(self, flat: Tensor, x: Any, y: Tensor) -> Tensor:  # (n, 16), or (n, O) if that is less
        values = self.function(flat, x, y)
        self.n_outputs = values.shape[1]
        if self.n_outputs <= _COMPARED_OUTPUTS:
            return values
        if self._weights is None:
            generator = torch.Generator(device="cpu").manual_seed(2)
            drawn = torch.randn(
                self.n_outputs, _COMPARED_OUTPUTS, generator=generator, dtype=torch.float64, device="cpu"
            )
            self._weights = (drawn / math.sqrt(self.n_outputs)).to(values)
        return values @ self._weights


class RowBuilder:
    """Forms the rows of some examples by the first route that gives the right ones.

    The function ``(flat parameters, inputs, targets) -> (n, O)`` is what the rows are the derivatives of; ``x`` and
    ``y`` are a few examples, to see which layers are called and to check the rows. The route is chosen, and rows are
    compared for the first time, with at most 16 outputs, so that the time does not grow with the number of outputs.

    Attributes
    ----------
    width : int
        The number of outputs O.
    reasons : dict of str
        Name of a route, or of a part of one -> why it is not taken.
    operations : int
        Estimated multiplications per example in a forward pass of the layers.
    example_bytes, example_pieces, compact_pieces
        Temporary memory per example while its rows are formed, and what is then held of them, as entries or compact.
    pushed_bytes : int
        Temporary memory per example and vector of a product in forward mode, which forms no rows.
    """

    @full_precision()
    def __init__(self, network: Network, function: RowFunction, x: Any, y: Tensor) -> None:
        self.network, self.function, self._few_outputs = network, function, _FewOutputs(function)
        self.working_bytes = limits(network.device).working_bytes
        self._attempts = Attempts()
        self.reasons = self._attempts.reasons
        self._by_layers = ByLayers(network, self._attempts)
        self._plain_routes: tuple[ByVmap | OneByOne, ...] = (ByVmap(self._attempts), OneByOne())
        self._turns, self._asked = 0, dict[str, tuple[int, int]]()  # by way: inputs so far, and when last compared
        few, y = take_examples(x, 0, _CHECKED_EXAMPLES), y[:_CHECKED_EXAMPLES]
        values, seen = self._by_layers.capture(self._few_outputs, few, y)
        self._by_layers.restrict_to(seen)
        self.width, times = self._few_outputs.n_outputs, self._few_outputs.n_outputs / values.shape[1]
        formed = {layer: layer.pieces(*seen[layer.name]) for layer in self._by_layers.layers}
        owned = sum(parameter.numel() for layer in formed for parameter in layer.module.parameters())
        self._owns_all = owned == sum(parameter.numel() for parameter in network.module.parameters())
        if not self._is_worthwhile(formed):
            self.reasons[ByLayers.name] = "layers with a rule have too few of the parameters"
        made = self._of_few_outputs().checked(few, y, torch.finfo(network.dtype).eps ** 0.6)[1]
        # the route is known from here on, and what follows says what it costs
        formed = formed if self.layers else {}
        self.example_pieces = [piece.outline(self.width) for piece in made]
        self._compact, self.compact_pieces = self._compact_form(seen, formed, made)
        self.operations = self._count_operations(values, seen)
        self.example_bytes = self._count_bytes(seen, formed, len(y), times)
        self.pushed_bytes = self._count_pushed_bytes(seen, values)
        if self.rest:
            self.example_bytes = max(self.example_bytes, self._count_plain_bytes(few, y))
            self.pushed_bytes = 2 * self.example_bytes // self.width

    def _of_few_outputs(self) -> RowBuilder:
        """Return the same for few outputs, as combinations of all."""
        other = copy.copy(self)
        other.function, other.width = self._few_outputs, min(self.width, _COMPARED_OUTPUTS)
        return other

    def _compact_form(
        self, seen: Seen, formed: Mapping[Layer, list[Piece]], made: list[Piece]
    ) -> tuple[frozenset[str], list[Piece]]:
        """Return the names of the layers of which factors are held where memory is short, and then all pieces."""
        names, smaller = frozenset[str](), list[Piece]()
        for layer, pieces in formed.items():
            entries = any(isinstance(piece, DensePiece) for piece in pieces)
            factors = layer.pieces(*seen[layer.name], compact=True) if entries else pieces
            if 2 * self._numbers(factors) <= self._numbers(pieces):
                names |= {layer.name}
            smaller += factors if layer.name in names else pieces
        starts = {start for start, _ in self.rest}
        rest = [piece for piece in made if isinstance(piece, DensePiece) and piece.column in starts]
        return names, [piece.outline(self.width) for piece in [*summed(smaller), *rest]]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers whose rows are formed by rules; none on the other routes."""
        return () if ByLayers.name in self.reasons else self._by_layers.layers

    @property
    def rest(self) -> tuple[Range, ...]:
        """The columns that no layer covers."""
        return ((0, self.network.n_parameters),) if ByLayers.name in self.reasons else self._by_layers.rest

    @property
    def route(self) -> str:
        """The name of the route, with the share of the parameters that layers cover."""
        if not self.layers:
            return next(route.name for route in self._plain_routes if route.name not in self.reasons)
        covered = self.network.n_parameters - sum(stop - start for start, stop in self.rest)
        return f"{ByLayers.name} ({covered / self.network.n_parameters:.0%} of the parameters)"

    def compacted(self) -> RowBuilder:
        """Return the same, with rows of several positions as factors, where that takes less memory."""
        other = copy.copy(self)
        other._by_layers = copy.copy(self._by_layers)
        other._by_layers.compact = self._compact
        return other

    def _numbers(self, pieces: list[Piece]) -> int:
        """Return how many numbers some pieces hold per example."""
        return sum(tensor.numel() for piece in pieces for tensor in piece.outline(self.width).tensors())

    @property
    def examples_at_a_time(self) -> int:
        """The number of examples whose rows are formed together, by the temporary memory that takes."""
        return max(1, self.working_bytes // self.example_bytes)

    @property
    def example_flops(self) -> float:
        """Floating-point operations per example of the layers: forwards, and twice that backwards for each output."""
        return 2.0 * self.operations * (1 + 2 * self.width)

    @property
    def fits(self) -> bool:
        """Whether the rows of one example can be formed in the memory that is meant for it."""
        return self.example_bytes <= self.working_bytes

    @property
    def whole(self) -> bool:
        """Whether the rows go by layers, and these hold all parameters of the network."""
        return bool(self.layers) and not self.rest and self._owns_all

    def is_due(self, way: str, n: int, first: int, one_in: int) -> bool:
        """Whether to compare rows of ``n`` more inputs: the ``first`` ones formed in this way, then one in so many."""
        asked, last = self._asked.get(way, (0, 0))
        due = asked < first or asked + n - last >= one_in
        self._asked[way] = asked + n, asked + n if due else last
        return due

    def pieces(self, x: Any, y: Tensor) -> list[Piece]:
        """Form the rows of some examples that were compared before, perhaps in other chunks."""
        if not self.layers:
            return self._dense_pieces(x, y)
        formed = self.form(x, y)
        return self.checked(x, y)[1] if formed is None else formed[1]

    @full_precision()
    def checked(self, x: Any, y: Tensor, tolerance: float = CHUNK_TOLERANCE, *, few: int | None = None) -> FormedRows:
        """Return the values (n, O) of the function on some examples, and their rows, compared with autograd.

        All examples are compared, and some of them also alone; or only a ``few`` that take turns and, if those differ,
        all after all: a GPU has other kernels for batches of another size, which round differently, and a ReLU at zero
        then goes the other way. If all differ, the next route is taken from then on.
        """
        size = min(len(y), few or len(y))
        start = 7919 * self._turns % (len(y) - size + 1)
        self._turns += 1
        reference = AutogradReference(self.network, self.function, x, y, start, start + size)
        if few is None:
            reference.check_alone()
        while True:
            formed, name = self.form(x, y), self.route
            allowed = max(tolerance, CHUNK_TOLERANCE) if name == OneByOne.name else tolerance
            if formed is not None and reference.agrees(*formed, allowed):
                return formed
            if size < len(y):
                size = len(y)
                reference = AutogradReference(self.network, self.function, x, y, 0, size)
                reference.check_alone()
            elif formed is None:
                self.reasons[ByLayers.name] = "a layer is called once for some examples and not for others"
            elif name == OneByOne.name:
                raise ModelError(COUPLED)
            else:
                self.reasons[ByLayers.name if self.layers else name] = "its rows differ from those of autograd"

    @full_precision()
    def form(self, x: Any, y: Tensor) -> FormedRows | None:
        """Return the values (n, O) of the function and the rows; None where these examples call layers differently."""
        if self.layers:
            formed = self._by_layers.form(self.function, x, y)
            return formed and (formed[0], formed[1] + self._dense_pieces(x, y))
        with recording(), self.network.lock:
            theta = self.network.theta.clone().requires_grad_()
            values = self.function(theta, *map_leaves(ordinary, (x, y))).detach()
        return values, self._dense_pieces(x, y)

    def probe(self, x: Any, y: Tensor) -> tuple[RowFunction, HeldBlock]:
        """Return a function with few outputs, as combinations of all, and its rows on some examples."""
        other = self._of_few_outputs()
        pieces, n = tuple(other.pieces(x, y)), len(y) * other.width
        return other.function, HeldBlock(pieces, n, self.network.n_parameters, other.width, self.network.theta)

    def watch(self, n: int, evaluate: Callable[[], Tensor]) -> tuple[Tensor, Seen]:
        """Return the values (n, O), and inputs and outputs of the layers that were called once, with examples first."""
        return self._by_layers.watch(n, evaluate)

    def plain(self, x: Any, y: Tensor, ranges: tuple[Range, ...]) -> Tensor:  # (m, c)
        """Return the entries of some columns, by the first plain route that torch can carry out."""
        theta, dims = self.network.theta, example_dims(x)
        inside = torch.cat([theta[start:stop] for start, stop in ranges])

        def one(values: Tensor, xi: Any, yi: Tensor) -> Tensor:  # (O,)
            parts, edge, offset = [], 0, 0
            for start, stop in ranges:
                parts += [theta[edge:start], values[offset : offset + stop - start]]
                edge, offset = stop, offset + stop - start
            flat = torch.cat([*parts, theta[edge:]])
            return self.function(flat, as_batch(xi, dims), yi[None])[0]

        return self._attempts.first(
            {route.name: partial(route.entries, one, inside, x, y, self.width) for route in self._plain_routes}
        )

    def _dense_pieces(self, x: Any, y: Tensor) -> list[Piece]:
        """Return the rows of the columns that no layer covers."""
        rest = self.rest
        if not rest:
            return []
        parts = self.plain(x, y, rest).split([stop - start for start, stop in rest], dim=1)
        return [DensePiece(entries, start) for entries, (start, _) in zip(parts, rest, strict=True)]

    def _is_worthwhile(self, formed: Mapping[Layer, list[Piece]]) -> bool:
        """Whether a pass by layers and another one for the rest are better than one plain pass for everything.

        A plain pass forms all rows at nearly the cost of some of them. What speaks for layers then is that factors are
        held instead of entries.
        """
        factored = sum(
            layer.n_parameters for layer, made in formed.items() if any(isinstance(piece, OuterPiece) for piece in made)
        )
        return bool(formed) and (not self.rest or 2 * factored >= self.network.n_parameters)

    def _count_bytes(self, seen: Seen, formed: Mapping[Layer, list[Piece]], n: int, times: float) -> int:
        """Estimate the temporary bytes per example of a pass by layers, with ``times`` as many outputs as were seen.

        First the graph of the forward pass and all gradients, twice while they are stacked; then what is left of them,
        the patches of one layer, and the entries of the layers so far.
        """
        sizes = {}  # numbers per example: inputs, and gradients of all outputs
        for layer in formed:
            inputs, gradients = seen[layer.name]
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
        return max(1, math.ceil(numbers * self.network.dtype.itemsize))

    def _count_pushed_bytes(self, seen: Seen, values: Tensor) -> int:
        """Estimate the temporary bytes per example and vector of forward mode: what goes into layers and comes out.

        Most of it is freed on the way; what lies between the layers counts as twice what comes out of them.
        """
        n, outputs = values.shape
        numbers = sum(inputs.numel() + 3 * gradients.numel() // outputs for inputs, gradients in seen.values())
        return max(1, numbers * self.network.dtype.itemsize // n)

    def _count_plain_bytes(self, x: Any, y: Tensor) -> int:
        """Estimate the temporary bytes per example of a plain route.

        It holds what differentiation saves in the forward pass, and its rows three times while they are joined.
        """
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with recording(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), self.network.lock:
            theta = self.network.theta.clone().requires_grad_()
            self.function(theta, *map_leaves(ordinary, (x, y)))
        saved.pop(theta.untyped_storage().data_ptr(), None)
        columns = sum(stop - start for start, stop in self.rest)
        copies = 3 * self.width + (2 if ByVmap.shared in self.reasons else 0)
        return math.ceil((sum(saved.values()) / len(y) + copies * columns) * self.network.dtype.itemsize)

    def _count_operations(self, values: Tensor, seen: Seen) -> int:
        """Estimate the multiplications per example that a forward pass takes in its layers."""
        total = 0
        for layer in self.layers:
            parameter = layer.module.get_parameter(next(iter(layer.columns)))
            total += seen[layer.name][1].numel() * parameter[0].numel()
        return total // values.numel()
