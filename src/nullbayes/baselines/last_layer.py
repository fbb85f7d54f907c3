r"""Last-layer Laplace: the columns of the last linear layer, with all their correlations."""

from __future__ import annotations

from typing import Any

from torch import nn

from nullbayes.baselines.linearized import LinearizedLaplace
from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn


class LastLayerLaplace(LinearizedLaplace):
    """Only the last layer varies (Daxberger et al. 2021).

    Parameters
    ----------
    model, likelihood, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    parameters : optional
        Which parameters make up the last layer; by default those of the ``nn.Linear`` that the network calls last.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        prior_precision: float = 1.0,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
    ) -> None:
        super().__init__(
            model, likelihood, parameters=parameters, prior_precision=prior_precision, batch_fn=batch_fn,
            output_fn=output_fn,
        )  # fmt: skip
        self._search = parameters is None

    def _open_rows(self, examples: Examples) -> OutputJacobian:
        if self._search:
            names = last_linear(self._network, examples.read(0, 1)[0])
            self._network = Network(self._network.model, names, self._network.output_fn)
        return super()._open_rows(examples)


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
