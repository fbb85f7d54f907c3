"""What a fit would do, before anything is spent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.loss_projected import LossProjectedPosterior
from nullbayes.posteriors.projected import ProjectedPosterior
from nullbayes.posteriors.resources import host_memory_bytes, memory_limit_bytes
from nullbayes.projectors import Plan, choose


def plan(
    model: nn.Module,
    loader: Iterable[Any],
    n_samples: int = 30,
    memory_limit: int | str | None = None,
    *,
    likelihood: str | Likelihood | LossFn = "classification",
    loss: bool = False,
    parameters: Selection = None,
    batch_fn: BatchFn | None = None,
    output_fn: OutputFn | None = None,
    tolerance: float | None = None,
) -> Plan:
    """Return the projector that a fit would take, why, and an estimate of its memory and work.

    Parameters
    ----------
    model, loader, n_samples, memory_limit, likelihood, parameters, batch_fn, output_fn, tolerance
        As for the posteriors and their ``fit``.
    loss : bool
        Plan for the loss-projected posterior.
    """
    kind, posterior = (LossJacobian, LossProjectedPosterior) if loss else (OutputJacobian, ProjectedPosterior)
    tolerance = posterior._tolerance if tolerance is None else tolerance
    rows = kind(model, loader, likelihood, parameters=parameters, batch_fn=batch_fn, output_fn=output_fn)
    limit = memory_limit_bytes(memory_limit, rows.device)
    host = host_memory_bytes(rows.device)
    return choose(rows, n_samples=n_samples, memory_limit=limit, rtol=tolerance, host_limit=host)
