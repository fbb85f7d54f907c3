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
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    hessian : bool
        Scale the rows by a root of the likelihood's Hessian in output space (the Gauss-Newton matrix proper); the paper
        takes the identity.
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
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    """

    _row_kind = LossJacobian
    _tolerance = LOSS_TOLERANCE
    _underfit_advice = (
        "The loss-projected posterior holds the losses to first order only: see check_fit(loader) for what that costs, "
        "and use prior_precision='auto', or tune(held_out_loader), if it is too much."
    )
