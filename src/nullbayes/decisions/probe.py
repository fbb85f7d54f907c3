"""A few inputs with the outputs of a network, by which a file tells whether another network is the same function."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import FileError
from nullbayes.jacobian.batches import n_examples
from nullbayes.jacobian.checks import SHIFTS, rounded_parameters
from nullbayes.jacobian.network import Network
from nullbayes.limits import is_out_of_memory
from nullbayes.precision import full_precision

_INPUTS, _NUMBERS, _OUTPUTS = 4, 2**16, 2**12  # inputs; their numbers together; outputs of each
_OF_SPREAD, _OF_SIZE, _COARSE = 1e-3, 1e-5, 5e-2  # by which outputs may differ on another machine; in half precision


@dataclass(frozen=True)
class Probe:
    """A few training inputs with the outputs of the network, which tell its function.

    Attributes
    ----------
    inputs : mapping of str to Tensor (n, ...)
        The tensors of the inputs on the CPU, by their places as JSON: names in mappings, numbers in tuples.
    outputs : Tensor (n, k)
        Some of the outputs, on the CPU.
    """

    inputs: Mapping[str, Tensor]
    outputs: Tensor

    def check(self, network: Network) -> None:
        """Refuse a network that is another function."""
        try:
            found = _answers(network, self.inputs)
        except Exception as error:
            msg = f"The model does not take the inputs that the posterior was fitted to: {error}"
            raise FileError(msg) from error
        known = self.outputs.double()
        coarse = any(torch.equal(known.to(kind).double(), known) for kind in (torch.float16, torch.bfloat16))
        share = _COARSE if coarse else _OF_SPREAD  # a model may compute in half precision
        limit = share * float(known.max() - known.min()) + _OF_SIZE * float(known.abs().max())
        if found.shape == known.shape and not float((found.double() - known).abs().max()) <= limit:
            rounded = _answers(network, self.inputs, rounded_parameters(network.whole)).double()
            limit += SHIFTS * float((rounded - found.double()).abs().max())  # where large numbers cancel
        if found.shape != known.shape or not float((found.double() - known).abs().max()) <= limit:
            msg = (
                "The model has the parameters that the posterior was fitted to, and computes something else: build it "
                "with the same layers and activations, and pass the same output_fn."
            )
            raise FileError(msg)


def make_probe(network: Network, x: Any) -> Probe | None:
    """Return a few inputs with their outputs, if they are small and made of tensors with an entry per example."""
    found = _places(x, [])
    if not found or any(leaf is None or leaf.is_complex() for leaf in found.values()):
        return None
    parts = {place: leaf for place, leaf in sorted(found.items()) if leaf is not None}
    few = min(_INPUTS, _NUMBERS // max(1, sum(leaf[:1].numel() for leaf in parts.values())))
    step = max(1, n_examples(x) // max(1, few))
    inputs = {place: leaf[::step][:few].cpu().clone() for place, leaf in parts.items()}
    try:
        outputs = _answers(network, inputs) if few else None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None  # a network that does not take so few examples
    return None if outputs is None or not bool(torch.isfinite(outputs).all()) else Probe(inputs, outputs)


def _places(x: Any, path: list[Any]) -> dict[str, Tensor | None]:
    """Return the tensors of inputs by their places, and None for what is no tensor with an entry per example."""
    if isinstance(x, Mapping) and x and all(isinstance(name, str) for name in x):
        entries: Iterable[tuple[Any, Any]] = x.items()
    elif isinstance(x, (tuple, list)) and x:
        entries = enumerate(x)
    else:
        return {json.dumps(path): x if isinstance(x, Tensor) and x.ndim else None}
    return {place: leaf for key, part in entries for place, leaf in _places(part, [*path, key]).items()}


@full_precision()
def _answers(network: Network, inputs: Mapping[str, Tensor], theta: Tensor | None = None) -> Tensor:  # (n, k)
    """Return some of the outputs of a network for the inputs of a probe, with its own or with other parameters."""
    tree: dict[Any, Any] = {}
    for place, leaf in inputs.items():
        path: list[Any] = [None, *json.loads(place)]
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf.to(network.device)
    x = _inputs(tree[None])
    with torch.no_grad():
        outputs = network.outputs(x) if theta is None else network.whole(theta, x)
    outputs = outputs.reshape(len(outputs), -1)
    return outputs[:, :: -(-outputs.shape[1] // _OUTPUTS)].cpu()


def _inputs(tree: Any) -> Any:
    """Return inputs from their tensors by place."""
    if isinstance(tree, Tensor):
        return tree
    parts = {key: _inputs(part) for key, part in tree.items()}
    return tuple(parts[i] for i in range(len(parts))) if all(isinstance(key, int) for key in parts) else parts
