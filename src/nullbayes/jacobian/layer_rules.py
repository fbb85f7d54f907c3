r"""One rule for each type of layer: its rows, from its inputs and from the gradients of its outputs.

A rule is a function ``(module, inputs, gradients) -> rows``. ``inputs`` (n, ...) went into the layer, ``gradients``
(n, O, ...) are the derivatives of each output of the network with respect to what came out of it. The rows are a
``SumPiece`` or a ``TablePiece``, which is given its columns later, or entries (n, O, *shape) for each parameter,
computed when they are asked for. To add a layer type, write such a function and name it in :data:`RULES`, or in
:data:`NAMED_RULES` if the type belongs to another package. Rows are compared with plain differentiation before they
are used, so that a rule need not foresee everything.

``find_layers`` says which layers of a network have a rule and do what their type says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nullbayes.jacobian.network import Network
from nullbayes.linalg.compact import SumPiece, TablePiece
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece
from nullbayes.torch_internals import has_hooks

Entries = dict[str, Callable[[], Tensor]]  # name of the parameter -> (n, O, *shape)


Rule = Callable[[Any, Tensor, Tensor], SumPiece | TablePiece | Entries]


def summed(pieces: Iterable[Piece]) -> list[Piece]:
    """Add up the shares of several layers in the rows of one parameter."""
    entries: dict[int, DensePiece] = {}
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, DensePiece) and piece.column in entries:
            entries[piece.column].matrix.add_(piece.matrix)
            continue
        if isinstance(piece, DensePiece):
            entries[piece.column] = piece
        result.append(piece)
    return result


def rule_for(kind: type[nn.Module]) -> Rule | None:
    """Return the rule of a type of layer, or None if there is none."""
    return RULES.get(kind) or NAMED_RULES.get(f"{kind.__module__}.{kind.__qualname__}")


# --- the layers of a network ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that has a rule, and the columns of its parameters that vary."""

    name: str
    module: nn.Module
    columns: Mapping[str, int]  # own name of the parameter -> first column
    uses: Mapping[str, int]  # own name of the parameter -> number of modules that have it

    @property
    def n_parameters(self) -> int:
        """The number of its parameters that vary."""
        return sum(self.module.get_parameter(name).numel() for name in self.columns)

    def pieces(self, inputs: Tensor, gradients: Tensor, *, compact: bool = False) -> list[Piece]:
        """Return its rows: as factors if an example has one position, as entries if it has several.

        With ``compact``, rows are held as factors whatever the number of positions. Of a parameter that other layers
        have as well, this is its share of the entries, because entries can be summed.
        """
        rule = rule_for(type(self.module))
        assert rule is not None
        rows = rule(self.module, inputs, gradients)
        if isinstance(rows, dict):
            each = ((rows[name](), column) for name, column in self.columns.items())
            return [DensePiece(entries.reshape(entries.shape[0] * entries.shape[1], -1), at) for entries, at in each]
        own = {name: column for name, column in self.columns.items() if self.uses[name] == 1}
        if not own or not (compact or (isinstance(rows, SumPiece) and rows.inputs.shape[1] == 1)):
            return list(_placed(rows, self.columns).entries())
        held: Piece = _placed(rows, own)
        if isinstance(held, SumPiece) and not compact:
            held = OuterPiece(held.inputs[:, 0], held.gradients[..., 0], held.weight, held.bias)
        shared = {name: column for name, column in self.columns.items() if name not in own}
        return [held, *(_placed(rows, shared).entries() if shared else ())]


def _placed(rows: SumPiece | TablePiece, columns: Mapping[str, int]) -> SumPiece | TablePiece:
    """Return rows for parameters that begin at these columns."""
    named: dict[str, Any] = dict(columns)
    return replace(rows, **named)


def find_layers(network: Network) -> tuple[Layer, ...]:
    """Return the layers that have a rule and parameters that vary."""
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
    """Leave out parameters that are used outside these layers as well, and layers that then have none."""
    layers = tuple(layers)
    found = Counter(column for layer in layers for column in layer.columns.values())
    kept = []
    for layer in layers:
        columns = {name: column for name, column in layer.columns.items() if found[column] == layer.uses[name]}
        if columns:
            kept.append(replace(layer, columns=columns))
    return tuple(kept)


def _is_changed(module: nn.Module) -> bool:
    """Whether a layer does something else than its type says: it has hooks, another forward or other parameters."""
    own = dict(module.named_parameters(recurse=False))
    return has_hooks(module) or "forward" in vars(module) or not own.keys() <= {"weight", "bias"}


# --- the rules --------------------------------------------------------------------------------------------------------


def _linear(module: nn.Linear, inputs: Tensor, gradients: Tensor) -> SumPiece:
    n, outputs, width = gradients.shape[0], gradients.shape[1], gradients.shape[-1]
    return SumPiece(inputs.reshape(n, -1, inputs.shape[-1]), gradients.reshape(n, outputs, -1, width).mT)


def _transposed_linear(module: nn.Module, inputs: Tensor, gradients: Tensor) -> Entries:
    n, outputs, width = gradients.shape[0], gradients.shape[1], gradients.shape[-1]
    flat, back = inputs.reshape(n, -1, inputs.shape[-1]), gradients.reshape(n, outputs, -1, width)
    return {"weight": lambda: flat.mT[:, None] @ back, "bias": lambda: back.sum(2)}


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, gradients: Tensor) -> SumPiece | Entries:
    patches, gradients = _patches(module, inputs), gradients.flatten(3)  # (n, in * kernel, T), (n, O, out, T)
    if module.groups == 1:
        return SumPiece(patches.mT, gradients)
    n, outputs, _, positions = gradients.shape
    grouped = gradients.reshape(n, outputs, module.groups, -1, positions)
    patches = patches.reshape(n, module.groups, -1, positions)
    return {
        "weight": lambda: torch.einsum("nogct,ngit->nogci", grouped, patches),
        "bias": lambda: gradients.sum(3),
    }


def _patches(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> Tensor:  # (n, in * kernel, T)
    """Return what each position of a convolution sees; views, copied once, are far faster than ``unfold``."""
    kernel, dims = module.kernel_size, len(module.kernel_size)
    reach = [d * (k - 1) for k, d in zip(kernel, module.dilation, strict=True)]
    if module.padding == "same":
        edges = [(r // 2, r - r // 2) for r in reach]
    else:
        edges = [(0, 0)] * dims if isinstance(module.padding, str) else [(p, p) for p in module.padding]
    if any(max(edge) > 0 for edge in edges):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, [p for edge in reversed(edges) for p in edge], mode)
    for axis in range(dims):
        inputs = inputs.unfold(2 + axis, reach[axis] + 1, module.stride[axis])
        inputs = inputs[..., :: module.dilation[axis]]
    # now (n, in, *positions, *kernel)
    order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    return inputs.permute(order).reshape(len(inputs), inputs.shape[1] * math.prod(kernel), -1)


def _by_channel(normalize: Callable[[Any, Tensor], Tensor]) -> Rule:
    """Return the rule of a layer that scales and shifts its normalized inputs by channel, at dimension 1."""

    def rule(module: nn.Module, inputs: Tensor, gradients: Tensor) -> Entries:
        n, outputs, channels = gradients.shape[:3]
        back = gradients.reshape(n, outputs, channels, -1)
        return {
            "weight": lambda: torch.einsum("noct,nct->noc", back, normalize(module, inputs).reshape(n, channels, -1)),
            "bias": lambda: back.sum(3),
        }

    return rule


def _by_feature(normalize: Callable[[Any, Tensor], Tensor]) -> Rule:
    """Return the rule of a layer that scales and shifts its normalized inputs by feature, at the last dimensions."""

    def rule(module: nn.LayerNorm | nn.RMSNorm, inputs: Tensor, gradients: Tensor) -> Entries:
        n, outputs, features = gradients.shape[0], gradients.shape[1], math.prod(module.normalized_shape)
        back = gradients.reshape(n, outputs, -1, features)
        return {
            "weight": lambda: torch.einsum("notc,ntc->noc", back, normalize(module, inputs).reshape(n, -1, features)),
            "bias": lambda: back.sum(2),
        }

    return rule


def _batch_norm(module: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def _group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    return F.group_norm(x, module.num_groups, eps=module.eps)


def _layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, eps=module.eps)


def _rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, eps=module.eps)


def _embedding(module: nn.Embedding, inputs: Tensor, gradients: Tensor) -> TablePiece:
    n, outputs, width = gradients.shape[0], gradients.shape[1], gradients.shape[-1]
    return TablePiece(inputs.reshape(n, -1), gradients.reshape(n, outputs, -1, width), module.num_embeddings)


def _prelu(module: nn.PReLU, inputs: Tensor, gradients: Tensor) -> Entries:
    n, outputs = gradients.shape[:2]
    back = gradients * inputs.clamp_max(0.0)[:, None]
    return {"weight": lambda: back.reshape(n, outputs, module.num_parameters, -1).sum(3)}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.BatchNorm1d: _by_channel(_batch_norm),
    nn.BatchNorm2d: _by_channel(_batch_norm),
    nn.BatchNorm3d: _by_channel(_batch_norm),
    nn.GroupNorm: _by_channel(_group_norm),
    nn.LayerNorm: _by_feature(_layer_norm),
    nn.RMSNorm: _by_feature(_rms_norm),
    nn.Embedding: _embedding,
    nn.PReLU: _prelu,
}
NAMED_RULES: dict[str, Rule] = {  # of packages that need not be installed
    "transformers.pytorch_utils.Conv1D": _transposed_linear,  # the linear layer of GPT-2: its weight is (in, out)
}
