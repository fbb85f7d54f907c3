r"""Three routes to the rows of some examples, tried in order: by layers, by ``vmap``, example by example.

*By layers*, one forward pass and one backward pass per output give all rows. For a linear layer :math:`z = W a + b`
the row of output :math:`o` is :math:`\partial f_o/\partial z \; a^\top`; for a convolution it is a sum of such products
over the positions; ``layer_rules`` has a rule for each type of layer. Layers that are called once in the forward pass
are covered this way; the row of a weight that several layers share, such as a tied embedding, is the sum of their
shares. Parameters that no layer covers are differentiated by one of the other two routes.

``row_builder`` compares the rows with plain differentiation, and takes the next route where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from nullbayes.jacobian.batches import example_dims, map_leaves, ordinary
from nullbayes.jacobian.layer_rules import Layer, find_layers, summed, with_all_uses
from nullbayes.jacobian.network import Network, RowFunction
from nullbayes.limits import is_out_of_memory
from nullbayes.linalg.pieces import Piece
from nullbayes.precision import differentiable, recording

Range = tuple[int, int]  # columns, from the first to before the last
Seen = dict[str, tuple[Tensor, Tensor]]  # name of a layer -> its inputs (n, ...), and its outputs or their gradients
Example = Callable[[Tensor, Any, Tensor], Tensor]  # (c,) parameters, inputs and target of one example -> (O,)
FormedRows = tuple[Tensor, list[Piece]]  # values (n, O), and their derivatives
T = TypeVar("T")

_OUTPUTS_AT_ONCE = 32  # per backward pass on a CPU: more is no faster


def gradients(value: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Differentiate one number; the derivative is zero for tensors that it does not depend on."""
    if not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    found = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
    return list(found)


def many_gradients(values: Tensor, tensors: list[Tensor], at_once: int) -> list[Tensor]:  # (O, ...) each
    """Differentiate several numbers, ``at_once`` of them per backward pass."""
    units = torch.eye(len(values), dtype=values.dtype, device=values.device)

    def zeros(tensor: Tensor) -> Tensor:
        return values.new_zeros(len(values), *tensor.shape)

    def one_pass(rows: slice) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            values, tensors, units[rows], retain_graph=True, is_grads_batched=True, allow_unused=True
        )

    if len(values) <= at_once:  # without a second copy, which may be large
        found = one_pass(slice(None))
        return [zeros(tensor) if part is None else part for part, tensor in zip(found, tensors, strict=True)]
    result = [zeros(tensor) for tensor in tensors]
    for start in range(0, len(values), at_once):
        rows = slice(start, start + at_once)
        for whole, part in zip(result, one_pass(rows), strict=True):
            if part is not None:
                whole[rows] = part
    return result


def watch_layers(
    layers: tuple[Layer, ...], n: int, evaluate: Callable[[], Tensor], *, expand: bool
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the values (n, O) that ``evaluate`` computes with a network, and what its layers saw on the way.

    The latter maps the names of the layers that were called once, with the examples in the first dimension, to their
    inputs and outputs. With ``expand``, inputs that all examples share, such as positions, are repeated for each.
    """
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in layers}

    def watcher(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            inputs = (args[0] if args else kwargs["input"]).detach()
            if expand and len(inputs) == len(output) == 1:
                inputs = inputs.expand(n, *inputs.shape[1:])
                output = output.expand(n, *output.shape[1:])
            calls[name].append((inputs, output))
            return output.clone()  # the next layer may change its input in place

        return hook

    with recording(), ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.module.register_forward_hook(watcher(layer.name), with_kwargs=True))
        values = evaluate()
    seen = {
        name: called[0]
        for name, called in calls.items()
        if len(called) == 1 and called[0][1].requires_grad and len(called[0][0]) == len(called[0][1]) == len(values)
    }
    return values, seen


class Attempts:
    """Several ways to compute the same thing, tried in order.

    A way that torch cannot carry out is not tried again; ``reasons`` says why. Where every way fails it is the fault of
    the input: the last error is raised, and nothing is remembered.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def first(self, ways: Mapping[str, Callable[[], T]]) -> T:
        """Return the result of the first way that can be carried out. Running out of memory is no reason."""
        *others, last = [name for name in ways if name not in self.reasons]
        failed: dict[str, str] = {}
        for name in others:
            try:
                result = ways[name]()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                failed[name] = str(error).partition("\n")[0]
            else:
                break
        else:
            result = ways[last]()
        self.reasons |= failed
        return result


class ByLayers:
    """Rows of the layers that have a rule, by one forward pass and the gradients of what they put out."""

    name = "by layers"
    expanded = "shared inputs expanded"
    together = "outputs in one backward pass"

    def __init__(self, network: Network, attempts: Attempts) -> None:
        self.network, self.attempts = network, attempts
        self.layers, self.rest = find_layers(network), tuple[Range, ...]()
        self.compact = frozenset[str]()  # names of layers whose rows are held as factors, whatever their positions

    def restrict_to(self, seen: Seen) -> None:
        """Leave out layers that were not called once; ``rest`` are then the columns that no layer covers."""
        self.layers = with_all_uses(layer for layer in self.layers if layer.name in seen)
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
        self.rest = tuple(gaps)

    def capture(self, function: RowFunction, x: Any, y: Tensor) -> tuple[Tensor, Seen]:
        """Run forward and backward, and keep what the layers saw that were called once, with examples first."""

        def evaluate() -> Tensor:
            theta = self.network.theta.clone().requires_grad_()
            return function(theta, *map_leaves(ordinary, (x, y)))

        values, once = self.watch(len(y), evaluate)
        found = self._backward(values, [output for _, output in once.values()])
        seen = {name: (inputs, g) for (name, (inputs, _)), g in zip(once.items(), found, strict=True)}
        return values.detach(), seen

    def watch(self, n: int, evaluate: Callable[[], Tensor]) -> tuple[Tensor, Seen]:
        """Return the values (n, O), and inputs and outputs of the layers that were called once."""
        with self.network.lock:
            return self.attempts.first(
                {
                    self.expanded: lambda: watch_layers(self.layers, n, evaluate, expand=True),
                    "inputs as they are": lambda: watch_layers(self.layers, n, evaluate, expand=False),
                }
            )

    def form(self, function: RowFunction, x: Any, y: Tensor) -> FormedRows | None:
        """Return values and rows; None where these examples do not call every layer once."""
        values, seen = self.capture(function, x, y)
        if any(layer.name not in seen for layer in self.layers):
            return None
        pieces: list[Piece] = []
        for layer in self.layers:
            pieces += layer.pieces(*seen.pop(layer.name), compact=layer.name in self.compact)
        return values, summed(pieces)

    def _backward(self, values: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        """Return the derivatives (n, O, ...) of every value with respect to what the layers put out."""
        if not outputs:
            return []
        with recording():
            total = values.sum(0)  # examples do not influence each other
            at_once = len(total) if values.is_cuda else _OUTPUTS_AT_ONCE

            def together() -> list[Tensor]:
                with differentiable():
                    return [found.transpose(0, 1) for found in many_gradients(total, outputs, at_once)]

            def one_by_one() -> list[Tensor]:
                passes = [gradients(value, outputs) for value in total]
                return [torch.stack(parts, dim=1) for parts in zip(*passes, strict=True)]

            if not values.is_cuda and len(total) <= at_once // 2:  # for few outputs, single passes are faster
                return one_by_one()
            return self.attempts.first({self.together: together, "one backward pass per output": one_by_one})


class ByVmap:
    """Rows of some parameters by ``vmap`` of reverse mode over the examples."""

    name = "vmap(jacrev)"
    shared = "parameters shared by the examples"

    def __init__(self, attempts: Attempts) -> None:
        self.attempts = attempts

    def entries(self, one: Example, values: Tensor, x: Any, y: Tensor, width: int) -> Tensor:  # (m, c)
        """Differentiate the function of one example for all examples at once."""
        dims = example_dims(x)
        # one output needs no map over outputs, which would double the cost
        rows_of = grad(lambda *args: one(*args)[0]) if width == 1 else jacrev(one)

        def shared() -> Tensor:
            return vmap(rows_of, in_dims=(None, dims, 0))(values, x, y)  # type: ignore[no-any-return]

        def copied() -> Tensor:  # LSTM and GRU add in place to what all examples share
            return vmap(rows_of, in_dims=(0, dims, 0))(values.expand(len(y), -1), x, y)  # type: ignore[no-any-return]

        with torch.no_grad(), differentiable():
            found = self.attempts.first({self.shared: shared, "parameters copied per example": copied})
        return found.reshape(-1, len(values))


class OneByOne:
    """Rows of some parameters by plain differentiation, one example and one output after the other."""

    name = "example by example"

    def entries(self, one: Example, values: Tensor, x: Any, y: Tensor, width: int) -> Tensor:  # (m, c)
        """Differentiate the function of one example in a loop."""
        rows, dims = [], example_dims(x)
        with recording():
            values, x, y = map_leaves(ordinary, (values, x, y))
            values = values.clone().requires_grad_()
            for i in range(len(y)):
                xi = map_leaves(lambda leaf, dim, i=i: leaf if dim is None else leaf[i], x, dims)
                rows += [gradients(value, [values])[0] for value in one(values, xi, y[i])]
        return torch.stack(rows)
