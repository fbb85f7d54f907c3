"""The layers of a network that a rule knows, that own parameters that vary, and that do what their type says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from nullbayes.jacobian.layer_rules import RULES, pieces
from nullbayes.jacobian.network import Network
from nullbayes.linalg.pieces import Piece


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that a rule knows, and where its parameters that vary are."""

    name: str
    module: nn.Module
    columns: Mapping[str, int]  # own name of the parameter -> first column

    @property
    def n_parameters(self) -> int:
        """Return how many of its parameters vary."""
        return sum(self.module.get_parameter(name).numel() for name in self.columns)

    def pieces(self, inputs: Tensor, gradients: Tensor) -> list[Piece]:  # (n, ...), (n, O, ...)
        """Return its rows."""
        return pieces(RULES[type(self.module)](self.module, inputs, gradients), self.columns)


def find_layers(network: Network) -> tuple[Layer, ...]:
    """Return the layers that rules know and that own parameters that vary, each parameter once."""
    starts, start = {}, 0
    for name, size in zip(network.names, network.sizes, strict=True):
        starts[name] = start
        start += size
    uses: dict[int, int] = {}
    for _, parameter in network.module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    layers = []
    for name, module in network.module.named_modules():
        if type(module) not in RULES or _is_changed(module):
            continue
        prefix = f"{name}." if name else ""
        own = dict(module.named_parameters(recurse=False))
        columns = {key: starts[prefix + key] for key in own if prefix + key in starts}
        if columns and all(uses[id(parameter)] == 1 for parameter in own.values()):
            layers.append(Layer(name, module, columns))
    return tuple(layers)


def _is_changed(module: nn.Module) -> bool:
    """Whether a layer does something else than its type says: hooks, another forward, parameters that make others."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    own = dict(module.named_parameters(recurse=False))
    return bool(hooked) or "forward" in vars(module) or not own.keys() <= {"weight", "bias"}
