r"""The two projected posteriors: samples in the null space of the training outputs, or of the training losses."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.header import Fields, flag
from nullbayes.posteriors.null_space import NullSpacePosterior
from nullbayes.posteriors.plan import LOSS_TOLERANCE, TOLERANCE


class ProjectedPosterior(NullSpacePosterior):
    r""":math:`\mathcal N(\theta, \alpha^{-1}(I - J^+ J))`: every sample predicts the training data as the network does.

    The samples lie in the null space of the output Jacobian (the paper's Section 3).

    Parameters
    ----------
    model : nn.Module
        The trained network; it is never changed.
    likelihood : str, Likelihood or callable
        What the outputs mean: "classification", "binary", "multilabel", "regression", a likelihood of
        ``nb.likelihoods``, or a loss of your own, ``(outputs, targets) -> (N,)``.
    parameters : None, str, iterable of str, or callable
        Which parameters vary: names, globs such as "head.*", or a predicate (name, parameter). By default all of them.
    prior_precision : "auto", "optimal", "paper" or float
        The scale of the samples; see the property of that name. "auto" predicts training data as well as the network.
    batch_fn : callable, optional
        Turns a batch of a loader into ``(inputs, targets)``. It is applied to every batch of a loader, also in
        ``predict``, which ignores the targets; never to inputs or pairs that are passed without one, as in
        ``fit(x, y)`` and ``predict(x)``.
    output_fn : callable, optional
        Takes the outputs out of what the model returns; by default its only tensor, or that called "logits".
    hessian : bool
        Scale the rows by a root of the likelihood's Hessian in output space (the Gauss-Newton matrix proper); the paper
        takes the identity.

    Examples
    --------
    The network is linear in four numbers, and the data determine it in the first two:

    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(4, 1, bias=False), torch.eye(4)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0)
    >>> posterior = posterior.fit(x[:2], torch.ones(2, 1), n_samples=10, generator=torch.Generator().manual_seed(0))
    >>> posterior.functional_variance(x, exact=True).flatten()
    tensor([0., 0., 1., 1.])
    >>> prediction = posterior.predict(x)
    >>> prediction.samples.shape, torch.equal(prediction.mean, model(x))
    (torch.Size([10, 4, 1]), True)
    >>> posterior.ood_score(x[:2]).max() < posterior.ood_score(x[2:]).min()
    tensor(True)
    """

    _header_fields: ClassVar[Fields] = {"hessian": flag}
    _row_kind = OutputJacobian
    _tolerance = TOLERANCE

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        prior_precision: str | float = "auto",
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
        hessian: bool = False,
    ) -> None:
        super().__init__(
            model,
            likelihood,
            parameters=parameters,
            prior_precision=prior_precision,
            batch_fn=batch_fn,
            output_fn=output_fn,
        )
        self._row_options: dict[str, Any] = {"hessian": hessian}


class LossProjectedPosterior(NullSpacePosterior):
    r""":math:`\mathcal N(\theta, \alpha^{-1}(I - L^+ L))`: every sample keeps each training loss, to first order.

    The samples lie in the null space of the gradients of the training losses (the paper's Section 4.1). There is one
    row per example instead of one per output: far cheaper for many outputs, and a larger null space. What the loss does
    not depend on may vary, on the training data as well; the report says by how much.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, prior_precision, batch_fn, output_fn : optional
        Which parameters vary, by name (all by default); the scale of the samples ("auto"); functions that read batches
        and outputs. See :class:`ProjectedPosterior` for details.

    Examples
    --------
    Ten examples with five outputs each are ten rows, not fifty:

    >>> import torch
    >>> import nullbayes as nb
    >>> x, y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 5
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.zeros(4, 5)})
    >>> posterior = nb.LossProjectedPosterior(model, prior_precision=100.0).fit(x, y)
    >>> posterior.report.n_rows, posterior.report.kernel_dimension
    (10, 10.0)
    """

    _row_kind = LossJacobian
    _tolerance = LOSS_TOLERANCE
    _underfit_advice = (
        "The loss-projected posterior holds the losses to first order only: see check_fit(loader) for what that costs, "
        "and use prior_precision='auto', or tune(held_out_loader), if it is too much."
    )
