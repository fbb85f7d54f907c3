"""The layers of a network that a rule knows, that own parameters that vary, and that do what their type says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from nullbayes.jacobian.layer_rules import pieces, rule_for
from nullbayes.jacobian.network import Network
from nullbayes.linalg.pieces import Piece


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that a rule knows, and where its parameters that vary are."""

    name: str
    module: nn.Module
    columns: Mapping[str, int]  # own name of the parameter -> first column
    uses: Mapping[str, int]  # own name of the parameter -> how many layers have it

    @property
    def n_parameters(self) -> int:
        """Return how many of its parameters vary."""
        return sum(self.module.get_parameter(name).numel() for name in self.columns)

    def pieces(self, inputs: Tensor, gradients: Tensor) -> list[Piece]:  # (n, ...), (n, O, ...)
        """Return its rows: those of a parameter that other layers have as well are its share, as entries."""
        rule = rule_for(type(self.module))
        assert rule is not None
        shared = {name for name in self.columns if self.uses[name] > 1}
        return pieces(rule(self.module, inputs, gradients), self.columns, shared)


def find_layers(network: Network) -> tuple[Layer, ...]:
    """Return the layers that rules know and that have parameters that vary, each parameter with all its uses."""
    starts, start = {}, 0
    varying = dict(network.module.named_parameters())
    for name, size in zip(network.names, network.sizes, strict=True):
        starts[id(varying.get(name))] = start
        start += size
    uses: dict[int, int] = {}
    for _, parameter in network.module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    layers = []
    for name, module in network.module.named_modules():
        if rule_for(type(module)) is None or _is_changed(module):
            continue
        own = dict(module.named_parameters(recurse=False))
        columns = {key: starts[id(parameter)] for key, parameter in own.items() if id(parameter) in starts}
        layers.append(Layer(name, module, columns, {key: uses[id(own[key])] for key in columns}))
    return with_all_uses(layers)


def with_all_uses(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Leave out parameters that are used outside of these layers as well, and layers that then have none."""
    layers = tuple(layers)
    found = Counter(column for layer in layers for column in layer.columns.values())
    kept = []
    for layer in layers:
        columns = {name: column for name, column in layer.columns.items() if found[column] == layer.uses[name]}
        if columns:
            kept.append(replace(layer, columns=columns))
    return tuple(kept)


def _is_changed(module: nn.Module) -> bool:
    """Whether a layer does something else than its type says: hooks, another forward, parameters that make others."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    own = dict(module.named_parameters(recurse=False))
    return bool(hooked) or "forward" in vars(module) or not own.keys() <= {"weight", "bias"}
