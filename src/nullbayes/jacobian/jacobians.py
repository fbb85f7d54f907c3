r"""The Jacobians of a network on its training data: ``OutputJacobian`` and ``LossJacobian``.

The first has one row for each output of each example, the second one gradient of the loss for each example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.jacobian.opening import open_data
from nullbayes.jacobian.rows import Formed, JacobianRows
from nullbayes.likelihoods import Likelihood, LossFn


class OutputJacobian(JacobianRows):
    r"""One row for each output of each example: :math:`\partial f_o(\theta, x_n) / \partial \theta`.

    Parameters
    ----------
    model : nn.Module
        The trained network.
    loader : iterable of batches
        The training data, in fixed order.
    likelihood : str, Likelihood or callable
        Checked against outputs and targets; gives the Hessian.
    hessian : bool
        Scale the rows of each example by a root of the likelihood's Hessian in output space, so that
        :math:`A^\top A` is the generalized Gauss-Newton matrix proper. The paper's default is the identity.
    parameters, batch_fn, output_fn, storage
        See :class:`Network <nullbayes.jacobian.network.Network>` and :class:`JacobianRows`.
    """

    def __init__(
        self,
        model: nn.Module | Network,
        loader: Iterable[Any] | Examples,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        hessian: bool = False,
        parameters: Selection = None,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
        storage: Formed = "recompute",
    ) -> None:
        opened = open_data(model, loader, likelihood, parameters, batch_fn, output_fn)
        network, examples, fitted = opened.network, opened.examples, opened.likelihood
        width = math.prod(network.output_shape(examples.read(0, 1)[0]))
        self.hessian, self.n_counted, self.output_stds = hessian, opened.n_counted, opened.output_stds
        ignoring = opened.n_counted < len(examples) * width

        def outputs(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            values = network(flat, x)
            if hessian:  # at the same outputs: once through the network, so that rows go by layers
                values = fitted.scaled(values, values.detach(), y)
            counted = fitted.counted(values, y) if ignoring else None
            return (values if counted is None else values * counted).flatten(1)

        super().__init__(
            network, examples, fitted, outputs, rows_per_example=width, output_std=opened.output_std,
            n_outputs=width, storage=storage,
        )  # fmt: skip


class LossJacobian(JacobianRows):
    r"""One row for each example: the gradient of its loss, :math:`\partial \ell(f(\theta, x_n), y_n)/\partial \theta`.

    Parameters
    ----------
    model, loader, likelihood, parameters, batch_fn, output_fn, storage
        As for :class:`OutputJacobian`; the likelihood may be any per-example loss ``(outputs, targets) -> (n,)``.
    """

    spares_short_rows = True  # examples whose loss hardly moves need not be held as closely as the others

    def __init__(
        self,
        model: nn.Module | Network,
        loader: Iterable[Any] | Examples,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
        storage: Formed = "recompute",
    ) -> None:
        opened = open_data(model, loader, likelihood, parameters, batch_fn, output_fn)
        network, examples, fitted = opened.network, opened.examples, opened.likelihood
        self.n_counted, self.output_stds = len(examples), opened.output_stds
        width = math.prod(network.output_shape(examples.read(0, 1)[0]))

        def losses(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            return fitted.loss(network(flat, x), y)[:, None]

        super().__init__(
            network,
            examples,
            fitted,
            losses,
            rows_per_example=1,
            output_std=opened.output_std,
            n_outputs=width,
            storage=storage,
        )
