r"""Rows by layers: one forward pass and a backward pass for each output give all rows of a range of examples.

For a linear layer :math:`z = W a + b` the row of output :math:`o` is :math:`\partial f_o/\partial z \; a^\top`; for a
convolution it is a sum of such products over the positions. Layers seen once in the forward pass, with parameters of
their own, are covered this way; what remains is differentiated example by example. Nothing is taken on trust: the rows
of the first examples are compared with plain differentiation, and if they differ, everything goes by the plain way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from nullbayes.jacobian.data import as_batch, example_dims, map_leaves, take_examples
from nullbayes.jacobian.network import Network, differentiable_kernels
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece
from nullbayes.precision import full_precision
from nullbayes.types import RowFunction

_CHECKED_EXAMPLES = 3


@dataclass(frozen=True)
class Layer:
    """A layer whose rows are products of what goes in and what comes back."""

    name: str
    module: nn.Linear | nn.Conv2d
    weight: int | None  # first column, None if it does not vary
    bias: int | None


def find_layers(network: Network) -> tuple[Layer, ...]:
    """Return the linear and convolution layers that own the parameters that vary, each parameter once."""
    columns, start = {}, 0
    for name, size in zip(network.names, network.sizes, strict=True):
        columns[name] = start
        start += size
    uses: dict[int, int] = {}
    for _, parameter in network.module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    layers = []
    for name, module in network.module.named_modules():
        if not (type(module) is nn.Linear or _plain_convolution(module)):
            continue
        assert isinstance(module, (nn.Linear, nn.Conv2d))
        prefix = f"{name}." if name else ""
        weight, bias = columns.get(prefix + "weight"), columns.get(prefix + "bias")
        own = all(uses[id(p)] == 1 for p in module.parameters(recurse=False))
        if own and (weight is not None or bias is not None):
            layers.append(Layer(name, module, weight, bias))
    return tuple(layers)


def _plain_convolution(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


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
    """

    def __init__(self, network: Network, function: RowFunction, x: Any, y: Tensor) -> None:
        self.network, self.function = network, function
        few = take_examples(x, 0, _CHECKED_EXAMPLES)
        self.layers = self._usable(find_layers(network), few, y[:_CHECKED_EXAMPLES])
        self.rest = self._uncovered()
        if self.layers and not self._agrees(few, y[:_CHECKED_EXAMPLES]):
            self.layers = ()
            self.rest = self._uncovered()

    @property
    def route(self) -> str:
        """Say how rows are formed."""
        if not self.layers:
            return "vmap(jacrev)"
        covered = self.network.n_parameters - sum(stop - start for start, stop in self.rest)
        return f"by layers ({covered / self.network.n_parameters:.0%} of the parameters)"

    @full_precision()
    def pieces(self, x: Any, y: Tensor) -> list[Piece]:
        """Form the rows of some examples."""
        result: list[Piece] = []
        if self.layers:
            inputs, gradients = self._capture(self.layers, x, y)
            for layer in self.layers:
                result += _layer_pieces(layer, inputs[layer.name], gradients[layer.name])
        if self.rest:
            entries = self.plain(x, y, self.rest)  # (m, c)
            offset = 0
            for start, stop in self.rest:
                result.append(DensePiece(entries[:, offset : offset + stop - start], start))
                offset += stop - start
        return result

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

        with torch.no_grad(), differentiable_kernels():
            entries: Tensor = vmap(jacrev(one), in_dims=(None, dims, 0))(inside, x, y)  # (n, O, c)
            return entries.flatten(0, 1)

    def _uncovered(self) -> tuple[tuple[int, int], ...]:
        covered = sorted(
            (start, start + parameter.numel())
            for layer in self.layers
            for start, parameter in ((layer.weight, layer.module.weight), (layer.bias, layer.module.bias))
            if start is not None and parameter is not None
        )
        gaps, edge = [], 0
        for start, stop in [*covered, (self.network.n_parameters, self.network.n_parameters)]:
            if start > edge:
                gaps.append((edge, start))
            edge = stop
        return tuple(gaps)

    def _usable(self, layers: tuple[Layer, ...], x: Any, y: Tensor) -> tuple[Layer, ...]:
        """Keep the layers that are called exactly once, with examples first."""
        inputs, gradients = self._capture(layers, x, y)
        return tuple(
            layer
            for layer in layers
            if layer.name in gradients and len(inputs[layer.name]) == len(y) == gradients[layer.name].shape[0]
        )

    def _agrees(self, x: Any, y: Tensor) -> bool:
        p = self.network.n_parameters
        wanted = self.plain(x, y, ((0, p),))
        formed = torch.zeros_like(wanted)
        for piece in self.pieces(x, y):
            piece.put_dense(formed)
        scale = wanted.norm(dim=1, keepdim=True)
        error = ((formed - wanted).norm(dim=1, keepdim=True) / torch.where(scale > 0, scale, 1.0)).max()
        return bool(error <= torch.finfo(wanted.dtype).eps ** 0.6)

    @full_precision()
    def _capture(self, layers: tuple[Layer, ...], x: Any, y: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return, for the layers called once, their inputs (n, ...) and the output gradients (n, O, ...)."""
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {layer.name: [] for layer in layers}

        def watch(name: str) -> Any:
            def hook(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
                seen[name].append(((args[0] if args else kwargs["input"]).detach(), output))
                return output.clone()  # what follows may change its input in place

            return hook

        handles = [layer.module.register_forward_hook(watch(layer.name), with_kwargs=True) for layer in layers]
        try:
            with torch.inference_mode(False), torch.enable_grad():  # whatever the mode around the call
                theta = self.network.theta.clone().requires_grad_()
                x, y = map_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, (x, y))
                rows = self.function(theta, x, y)  # (n, O)
                summed = [rows[:, o].sum() for o in range(rows.shape[1])]
        finally:
            for handle in handles:
                handle.remove()
        once = {name: calls[0] for name, calls in seen.items() if len(calls) == 1 and calls[0][1].requires_grad}
        outputs = [output for _, output in once.values()]
        if not outputs:
            return {}, {}
        gradients = [
            torch.autograd.grad(value, outputs, retain_graph=o + 1 < len(summed), allow_unused=True)
            for o, value in enumerate(summed)
        ]
        stacked = {}
        for i, (name, (_, output)) in enumerate(once.items()):
            parts = [g[i] if g[i] is not None else torch.zeros_like(output) for g in gradients]
            stacked[name] = torch.stack(parts, dim=1)
        return {name: inputs for name, (inputs, _) in once.items()}, stacked


def _layer_pieces(layer: Layer, inputs: Tensor, gradients: Tensor) -> list[Piece]:
    """Return the rows of one layer: factors where an example has one position, entries where it has several."""
    module = layer.module
    if isinstance(module, nn.Conv2d):
        assert not isinstance(module.padding, str)
        patches = nn.functional.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)
        inputs = patches.transpose(1, 2)  # (n, T, in)
        gradients = gradients.flatten(3).transpose(2, 3)  # (n, O, T, out)
    elif inputs.ndim == 2:
        return [OuterPiece(inputs, gradients, layer.weight, layer.bias)]
    else:
        inputs, gradients = inputs.flatten(1, -2), gradients.flatten(2, -2)
    n, outputs, _, out = gradients.shape
    result: list[Piece] = []
    if layer.weight is not None:
        entries = gradients.mT @ inputs[:, None]  # (n, O, out, in)
        result.append(DensePiece(entries.reshape(n * outputs, -1), layer.weight))
    if layer.bias is not None:
        result.append(DensePiece(gradients.sum(2).reshape(n * outputs, out), layer.bias))
    return result
