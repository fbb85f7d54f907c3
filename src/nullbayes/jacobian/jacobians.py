r"""The Jacobians of a network on its training data: ``OutputJacobian`` and ``LossJacobian``.

The first has one row for each output of each example, the second one gradient of the loss for each example.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nullbayes.errors import DataError, InputError, NullBayesError, NullBayesWarning
from nullbayes.jacobian.batches import BatchFn, described, leaves
from nullbayes.jacobian.checks import check_derivatives, check_examples, check_outputs
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.meaning import check_ending, check_labels, check_values, compare_with_mask
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.jacobian.rows import Formed, JacobianRows
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, LossFn, Regression, resolve
from nullbayes.memory import is_out_of_memory

_OPENED = {"cpu": 64, "cuda": 1024}  # examples that the network answers at a time


class _Opened(NamedTuple):
    """What the rows are made of, and what was seen of it."""

    network: Network
    examples: Examples
    likelihood: Likelihood
    n_counted: int  # outputs that the targets speak of
    output_std: float
    output_stds: Tensor | None  # (O,) of outputs that are independent, each in units of its own


def _open(
    model: nn.Module | Network,
    loader: Iterable[Any] | Examples,
    likelihood: str | Likelihood | LossFn,
    parameters: Selection,
    batch_fn: BatchFn | None,
    output_fn: OutputFn | None,
) -> _Opened:
    """Check model, data and likelihood against each other, and fit what the likelihood takes from the data."""
    network = model if isinstance(model, Network) else Network(model, parameters, output_fn)
    examples = (
        loader if isinstance(loader, Examples) else Examples(loader, batch_fn, network.device, dtype=network.dtype)
    )
    few, few_targets = examples.read(0, min(8, len(examples)))
    answers = _first_answers(network, few)
    check_outputs(examples, 0, answers)
    network.trained_on = described(few)  # once the network takes them
    check_examples(network, few)
    check_derivatives(network, few)
    chosen = resolve(likelihood)
    outputs, targets, n_counted, beside_mask = [], [], 0, [False, False]
    for start, stop in examples.ranges(_OPENED.get(network.device.type, 64)):
        x, y = examples.read(start, stop)
        outputs.append(network.outputs(x))
        targets.append(y)
        check_outputs(examples, start, outputs[-1])
        chosen.check(outputs[-1], y)
        beside_mask = [a or b for a, b in zip(beside_mask, compare_with_mask(chosen, x, y), strict=True)]
        counted = chosen.counted(outputs[-1], y)
        n_counted += outputs[-1].numel() if counted is None else int(counted.sum())
    if n_counted == 0 and not examples.partial:
        msg = "Every target is one to be ignored (ignore_index): there is nothing to project on."
        raise DataError(msg)
    check_ending(network, chosen, few)
    check_labels(network, chosen, few, few_targets, answers)
    whole = torch.cat(outputs), torch.cat(targets)
    fitted = chosen.fitted(*whole)
    if not examples.partial:
        check_values(fitted, *whole)
    apart = whole[0].ndim == 2 and isinstance(chosen, (Bernoulli, Regression))
    stds = whole[0].double().std(0, unbiased=False) if apart else None
    if beside_mask[0] and not examples.partial:
        message = (
            "Some labels count where attention_mask is 0: padding becomes part of the training data. Label it with "
            "ignore_index (-100)."
        )
        warnings.warn(message, NullBayesWarning, stacklevel=2)
    if isinstance(fitted, Classification) and beside_mask[1]:
        fitted = replace(fitted, more_ignored=True)
    return _Opened(network, examples, fitted, n_counted, chosen.spread(*whole), stds)


def _first_answers(network: Network, x: Any) -> Tensor:
    """Return the outputs on the first examples, or say of what form they are that the network cannot take."""
    try:
        return network.outputs(x)
    except NullBayesError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        whole = "type" in said[0] and any(not leaf.is_floating_point() for leaf in leaves(x))
        hint = f" Whole numbers may have to be converted: x.to({network.dtype})." if whole else ""
        msg = f"The network failed on the first batch, {described(x)} (n examples): {said[0]}{hint}"
        raise InputError(msg) from error


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
        storage: Formed = "form",
    ) -> None:
        opened = _open(model, loader, likelihood, parameters, batch_fn, output_fn)
        network, examples, fitted, n_counted, output_std, self.output_stds = opened
        shape = network.output_shape(examples.read(0, 1)[0])
        self.hessian, self.n_counted = hessian, n_counted
        ignoring = n_counted < len(examples) * math.prod(shape)

        def outputs(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            values = network(flat, x)
            if hessian:  # at the same outputs: once through the network, so that rows go by layers
                values = fitted.scaled(values, values.detach(), y)
            counted = fitted.counted(values, y) if ignoring else None
            return (values if counted is None else values * counted).flatten(1)

        super().__init__(
            network, examples, fitted, outputs, granule=math.prod(shape), output_std=output_std,
            n_outputs=math.prod(shape), storage=storage,
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
        storage: Formed = "form",
    ) -> None:
        opened = _open(model, loader, likelihood, parameters, batch_fn, output_fn)
        network, examples, fitted, _, output_std, self.output_stds = opened
        self.n_counted = len(examples)  # losses
        width = math.prod(network.output_shape(examples.read(0, 1)[0]))

        def losses(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            return fitted.loss(network(flat, x), y)[:, None]

        super().__init__(
            network, examples, fitted, losses, granule=1, output_std=output_std, n_outputs=width, storage=storage
        )
