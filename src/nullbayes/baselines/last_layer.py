"""Last-layer Laplace: the parameters of the last linear layer, with all their correlations."""

from __future__ import annotations

from typing import Any

from torch import nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.linearized import FullCovariance
from nullbayes.errors import ModelError
from nullbayes.jacobian.network import Network


class _LastLayer(FullCovariance):
    def parameters(self, network: Network, x: Any) -> Network:
        return Network(network.model, last_linear(network, x), network.output_fn)


class LastLayerLaplace(Baseline):
    """Laplace approximation in which only the last layer varies (Daxberger et al. 2021).

    Parameters
    ----------
    model, likelihood, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    parameters : optional
        Which parameters make up the last layer; by default those of the ``nn.Linear`` that the network calls last.
    """

    _method = _LastLayer()


def last_linear(network: Network, x: Any) -> list[str]:
    """Return the names of the parameters of the linear layer that the network calls last."""
    called: list[nn.Module] = []
    with network.lock:
        hooks = [
            layer.register_forward_hook(lambda layer, *_: called.append(layer))
            for layer in network.module.modules()
            if isinstance(layer, nn.Linear)
        ]
        try:
            network.outputs(x)
        finally:
            for hook in hooks:
                hook.remove()
    if not called:
        msg = "The network calls no nn.Linear, so its last layer is not known: name its parameters, parameters=[...]."
        raise ModelError(msg)
    wanted = {id(parameter) for parameter in called[-1].parameters()}
    return [name for name, parameter in network.module.named_parameters() if id(parameter) in wanted]
