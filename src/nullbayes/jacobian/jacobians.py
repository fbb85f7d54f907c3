"""The Jacobians of a network on its training data: of its outputs, and of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.checks import check_loss
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.jacobian.opening import open_data
from nullbayes.jacobian.rows import Formed, JacobianRows
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, LossFn, Regression


class OutputJacobian(JacobianRows):
    r"""The rows :math:`\partial f_o(\theta, x_n) / \partial \theta`, one for each output of each example.

    Parameters
    ----------
    model : nn.Module
        The trained network. It is not changed.
    loader : iterable of batches
        The training data, in fixed order.
    likelihood : str, Likelihood or callable
        Checked against outputs and targets. It gives the Hessian.
    hessian : bool
        Scale the rows of each example by a root of the likelihood's Hessian in output space, so that
        :math:`A^\top A` is the generalized Gauss-Newton matrix. By default the Hessian is replaced by the identity.
    parameters : None, str, iterable of str, or callable (name, parameter) -> bool
        Which parameters vary: all that require gradients, those whose names match a glob such as ``"head.*"``, or
        those for which the predicate holds.
    batch_fn : callable, optional
        Turns a batch of the loader into ``(inputs, targets)``. It is not applied to a pair (x, y).
    output_fn : callable, optional
        Takes the outputs out of what the model returns.
    storage : "recompute" or "matrix_free"
        Form the entries of a block whenever they are needed, or only multiply with it.

    Raises
    ------
    ModelError, DataError, LikelihoodError
        If the model cannot be differentiated example by example, the data cannot be read twice in the same order, or
        they do not fit the likelihood.

    Examples
    --------
    >>> import torch
    >>> model, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    >>> OutputJacobian(model, [(x, torch.tensor([0, 1, 0, 1, 0]))]).dense().shape
    torch.Size([10, 8])
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
        ignoring = opened.n_counted < examples.n_all * width

        def outputs(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            values = network(flat, x)
            if hessian:  # at the same outputs: the network is called once, so that rows are formed by layers
                values = fitted.scaled(values, values.detach(), y)
            counted = fitted.counted(values, y) if ignoring else None
            return (values if counted is None else values * counted).flatten(1)

        super().__init__(
            network, examples, fitted, outputs, rows_per_example=width, output_std=opened.output_std,
            n_outputs=width, storage=storage,
        )  # fmt: skip


class LossJacobian(JacobianRows):
    r"""The gradients of the loss :math:`\partial \ell(f(\theta, x_n), y_n)/\partial \theta`, one row for each example.

    Parameters
    ----------
    model, loader, likelihood, parameters, batch_fn, output_fn, storage
        As for :class:`OutputJacobian`. The likelihood may be any loss per example, ``(outputs, targets) -> (n,)``.

    Examples
    --------
    >>> import torch
    >>> model, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    >>> LossJacobian(model, [(x, torch.tensor([0, 1, 0, 1, 0]))]).dense().shape
    torch.Size([5, 8])
    """

    spares_short_rows = True  # examples with a small gradient need not be kept as exactly as the others

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
        if type(fitted) not in (Bernoulli, Classification, Regression):  # those are known to be right
            check_loss(network, fitted.loss, *examples.read(0, min(8, len(examples))))
        self.n_counted, self.output_stds = examples.n_all, opened.output_stds
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
