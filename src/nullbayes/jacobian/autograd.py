"""Plain differentiation by autograd, and what the layers of a network see in a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nullbayes.jacobian.layer_rules import Layer


class RowFunction(Protocol):
    """What the rows are the derivatives of: one output of the network, or its loss, for each row."""

    def __call__(self, flat: Tensor, x: Any, y: Tensor) -> Tensor:  # (P,) -> (n, O)
        """Evaluate at flat parameters on some examples."""


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record for differentiation, whatever the mode around the call."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def ordinary(leaf: Tensor) -> Tensor:
    """Return a tensor that may take part in differentiation: a copy of an inference tensor, else itself."""
    return leaf.clone() if leaf.is_inference() else leaf


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

    with recording():
        handles = [layer.module.register_forward_hook(watcher(layer.name), with_kwargs=True) for layer in layers]
        try:
            values = evaluate()
        finally:
            for handle in handles:
                handle.remove()
    seen = {
        name: called[0]
        for name, called in calls.items()
        if len(called) == 1 and called[0][1].requires_grad and len(called[0][0]) == len(called[0][1]) == len(values)
    }
    return values, seen
