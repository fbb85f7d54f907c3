"""The trained parameters as leaves of the graph: plain differentiation at the least cost a call.

A call with the flat vector cuts it into pieces, finds the place of each in the module by its name, and joins the pieces
again on the way back. For one input to a small network that takes longer than the network itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.jacobian.network import Network


class Leaves:
    """A network at its trained parameters, each a tensor of its own that can be differentiated with respect to.

    Parameters
    ----------
    network : Network
        The function of the parameters. The leaves share the memory of its flat vector.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        with torch.inference_mode(False):
            theta = network.theta.clone() if network.theta.is_inference() else network.theta.detach()
            self.tensors = tuple(piece.detach().requires_grad_() for piece in network.unflatten(theta).values())
        module, named = network.module, dict(zip(network.names, self.tensors, strict=True))
        leaf_of = {id(p): named[name] for name, p in module.named_parameters() if name in named}
        self._places = [  # all of them, where a parameter has several
            (part._parameters, name, leaf_of[id(p)])
            for part in module.modules()
            for name, p in part._parameters.items()
            if id(p) in leaf_of
        ]

    @staticmethod
    def of(network: Network) -> Leaves | None:
        """Return the leaves of a network, made once.

        None where it is not enough to exchange tensors in a module's dictionary of parameters: recurrent layers and
        scripts keep references of their own.
        """
        with network.lock:
            if "leaves" not in network.cache:
                kept = any(isinstance(m, (nn.RNNBase, torch.jit.ScriptModule)) for m in network.module.modules())
                network.cache["leaves"] = None if kept else Leaves(network)
            found: Leaves | None = network.cache["leaves"]
            return found

    def outputs(self, x: Any) -> Tensor:  # (n, ...)
        """Evaluate the network."""
        return self.network.evaluate(x, self._run).to(self.network.dtype)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = [own[name] for own, name, _ in self._places]
        try:
            for own, name, leaf in self._places:
                own[name] = leaf  # type: ignore[assignment]
            return self.network.module(*args, **kwargs)
        finally:
            for (own, name, _), tensor in zip(self._places, before, strict=True):
                own[name] = tensor
