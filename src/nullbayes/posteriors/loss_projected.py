r"""The loss-projected posterior: samples in the kernel of the per-example loss gradients (the paper's Section 4.1)."""

from __future__ import annotations

from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import LossJacobian
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.posteriors.kernel import KernelPosterior


class LossProjectedPosterior(KernelPosterior):
    r""":math:`\mathcal N(\theta, \alpha^{-1}(I - L^+ L))`: every sample keeps each training loss, to first order.

    One row an example instead of one an output: far cheaper for many outputs, and a larger kernel. What the loss does
    not see may vary, on the training data too; the report says by how much.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    """

    _tolerance = 2e-2
    _underfit_advice = (
        "The loss-projected posterior holds the losses to first order only: see check_fit(loader) for what that costs, "
        "and use prior_precision='auto', or tune(held_out_loader), if it is too much."
    )

    def _open_rows(self, examples: Examples) -> JacobianRows:
        return LossJacobian(self._network, examples, self._likelihood)
