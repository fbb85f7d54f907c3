"""Features: what goes into the last layer of a network, which says more about an input than its outputs do.

The last layer is found by watching which linear layer or convolution returns the outputs. Where none does, the features
are the inputs of the last such layer that was called, and where there is none at all, the outputs themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.batches import join_examples, n_examples, take_examples
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network

OUTPUTS = "<outputs>"  # in place of the name of a layer: the outputs of the network are the features
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_AT_ONCE = {"cpu": 256, "cuda": 1024}  # examples
FEW = 7  # examples that the last layer is looked for with: a layer may see a part of them only


@dataclass(frozen=True)
class Seen:
    """What a network computes for some inputs.

    Attributes
    ----------
    outputs : Tensor (n, ...)
        The outputs of the network.
    features : Tensor (n, d)
        The inputs of a layer; the mean over its positions, where it has several per example.
    """

    outputs: Tensor
    features: Tensor


@dataclass(frozen=True)
class Head:
    """The last layer of a network that ends in a linear layer: ``outputs = features @ weight.T + bias``."""

    weight: Tensor  # (O, d)
    bias: Tensor  # (O,)

    def __call__(self, features: Tensor) -> Tensor:  # (n, d) -> (n, O)
        """Return the outputs that belong to some features."""
        return features @ self.weight.T + self.bias


class FeatureReader:
    """Reads the inputs of one layer of a network, together with the network's outputs.

    Parameters
    ----------
    network : Network
        The trained network.
    layer : str
        The name of the layer, as in ``model.named_modules()``; `OUTPUTS` for the outputs themselves.
    """

    def __init__(self, network: Network, layer: str) -> None:
        self.network, self.layer = network, layer
        self._module: nn.Module | None = None
        if layer != OUTPUTS:
            try:
                self._module = network.module.get_submodule(layer)
            except AttributeError as error:
                msg = f"The model has no layer {layer!r}: look at [name for name, _ in model.named_modules()]."
                raise SettingsError(msg) from error

    def __call__(self, x: Any) -> Seen:
        """Run the network on some inputs."""
        if self._module is None:
            outputs = self.network.outputs(x)
            return Seen(outputs, outputs.flatten(1))
        calls: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            calls.extend(value.detach().clone() for value in tensors if value.is_floating_point())  # not words or masks

        with self.network.lock, self._module.register_forward_pre_hook(keep, with_kwargs=True):
            outputs = self.network.outputs(x)
        if len(calls) != 1 or len(calls[0]) != len(outputs) or calls[0].ndim < 2:
            shapes = ", ".join(str(tuple(call.shape)) for call in calls) or "no tensor"
            msg = (
                f"The layer {self.layer!r} was given {shapes} when the network was given {len(outputs)} examples. "
                "Features are one floating-point tensor with an entry per example: name another layer."
            )
            raise ModelError(msg)
        images = calls[0].ndim > 3 and not isinstance(self._module, (nn.Linear, nn.LayerNorm))
        channels_first = images or isinstance(self._module, _CONVOLUTIONS)
        return Seen(outputs, _pooled(calls[0].to(outputs.dtype), x, channels_first=channels_first))

    def all(self, examples: Examples) -> Iterator[tuple[Seen, Tensor]]:
        """Iterate over what the network computes for all training examples, with their targets."""
        for start, stop in examples.ranges(_AT_ONCE.get(self.network.device.type, 256)):
            x, y = examples.read(start, stop)
            yield self(x), y

    def some(self, batches: Iterable[tuple[Any, Tensor]], size: int) -> Tensor:  # (n, d)
        """Return the features of the examples of batches, ``size`` at a time."""
        found: list[Tensor] = []
        waiting: list[Any] = []
        count = 0
        for x, y in batches:
            waiting.append(x)
            count += len(y)
            if count >= size:  # a call per batch would take longer than what it computes
                found += self._parts(waiting, size)
                waiting, count = [], 0
        return torch.cat([*found, *(self._parts(waiting, size) if waiting else [])])

    def _parts(self, inputs: list[Any], size: int) -> list[Tensor]:
        x = join_examples(inputs)
        return [self(take_examples(x, i, i + size)).features for i in range(0, n_examples(x), size)]

    def head(self) -> Head | None:
        """Return the layer as a linear map to the outputs; None if it is no linear layer."""
        layer = self._module
        if not isinstance(layer, nn.Linear):
            return None
        weight = layer.weight.detach().to(self.network.dtype)
        bias = torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.detach().to(self.network.dtype)
        return Head(weight, bias)


def _pooled(features: Tensor, x: Any, *, channels_first: bool) -> Tensor:  # (n, ...) -> (n, d)
    """Return one vector per example: the mean over its positions, without those that the inputs mask."""
    if features.ndim == 2:
        return features
    if channels_first:
        return features.flatten(2).mean(2)
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if isinstance(mask, Tensor) and features.ndim == 3 and mask.shape == features.shape[:2]:
        counts = mask.to(features)[..., None]
        return (features * counts).sum(1) / counts.sum(1).clamp_min(1.0)
    return features.flatten(1, -2).mean(1)


def find_last_layer(network: Network, x: Any) -> tuple[str, bool]:
    """Return the name of the last layer, and whether the outputs are what it returns.

    ``x`` are inputs of which the first few are used. The name is `OUTPUTS` if there is no layer with usable inputs.
    """
    found: list[tuple[str, Any, Any]] = []
    few = take_examples(x, 0, FEW)

    def watcher(name: str) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            result = output.clone() if isinstance(output, Tensor) else None  # may be changed in place
            found.append((name, next(iter((*args, *kwargs.values())), None), result))

        return keep

    with network.lock, ExitStack() as hooks:
        for name, part in network.module.named_modules():
            if isinstance(part, (nn.Linear, *_CONVOLUTIONS)):
                hooks.enter_context(part.register_forward_hook(watcher(name), with_kwargs=True))
        outputs = network.outputs(few)
    names = [name for name, _, _ in found]
    usable = [  # called once, with an entry per example; layers of users may take and return anything
        (name, given, result)
        for name, given, result in found
        if names.count(name) == 1 and isinstance(given, Tensor) and given.ndim > 1 and len(given) == len(outputs)
    ]
    for name, _, result in reversed(usable):
        same_size = result is not None and result.numel() == outputs.numel()
        if same_size and torch.equal(result.reshape(-1).to(outputs), outputs.reshape(-1)):
            return name, True
    return (usable[-1][0], False) if usable else (OUTPUTS, False)
