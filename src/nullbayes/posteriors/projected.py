r"""The projected posterior: samples in the kernel of the output Jacobian (the paper's Section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.header import Fields, flag
from nullbayes.posteriors.kernel import KernelPosterior


class ProjectedPosterior(KernelPosterior):
    r""":math:`\mathcal N(\theta, \alpha^{-1}(I - J^+ J))`: every sample predicts the training data as the network does.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    hessian : bool
        Scale the rows by a root of the likelihood's Hessian in output space (the Gauss-Newton matrix proper); the paper
        takes the identity.
    """

    _tolerance = 1e-2
    _header_fields: ClassVar[Fields] = {"based": flag, "hessian": flag}

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
            model, likelihood, parameters=parameters, prior_precision=prior_precision, batch_fn=batch_fn,
            output_fn=output_fn,
        )  # fmt: skip
        self._hessian = hessian

    def _header(self) -> dict[str, Any]:
        return {**super()._header(), "hessian": self._hessian}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        super()._restore(tensors, header)
        self._hessian = bool(header["hessian"])

    def _open_rows(self, examples: Examples) -> JacobianRows:
        return OutputJacobian(self._network, examples, self._likelihood, hessian=self._hessian)
