"""Training data opened again, to build rows and projector of a posterior that has samples: a method of a posterior."""

from __future__ import annotations

from typing import Any, TypeVar

from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.posteriors.fitting import build
from nullbayes.posteriors.measured import Measured
from nullbayes.posteriors.parallel import network_of, request, sharing
from nullbayes.posteriors.plan import make_plan, within_memory
from nullbayes.posteriors.progress import Meter
from nullbayes.projectors import Projector

P = TypeVar("P")


def prepare(
    self: P,
    loader: Any,
    targets: Any = None,
    *,
    projector: str | Projector = "auto",
    tolerance: float | None = None,
    memory_limit: int | str | None = None,
    parallel: str | None = None,
) -> P:
    """Build rows and projector again, for ``extend`` and exact variances after ``load``, a copy or ``release``.

    Parameters
    ----------
    loader, targets : iterable of batches, or inputs and targets
        The training data of the fit, in the same order. Other data are refused.
    projector, memory_limit, parallel
        As for :meth:`fit`.
    tolerance : float, optional
        By default that of the fit.

    Returns
    -------
    ProjectedPosterior
        The posterior itself; its samples do not change.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> posterior.release().prepare(x[:2], y[:2]).extend(5).n_samples
    15
    """
    posterior: Any = self
    measured, data = posterior._need_measured(), loader if targets is None else (loader, targets)
    posterior._network.check_unchanged()
    rtol, n = measured.tolerance if tolerance is None else tolerance, posterior.n_samples
    with sharing(parallel) as shared:
        network = network_of(posterior._network, shared)
        if posterior._network.division is not None and network.division is None:
            msg = 'The processes divide the parameters of this posterior: prepare(..., parallel="parameters").'
            raise SettingsError(msg)
        kind = posterior._kind(network)
        asked = request(kind, data, posterior._likelihood, shared, n, projector, rtol, memory_limit)
        check_same_data(asked.rows, measured)
        if posterior._network.division is None and network.division is not None:
            posterior._directions = network.own_columns(posterior.directions).clone()
        posterior._network = network
        posterior.release()._likelihood = asked.rows.likelihood
        meter = Meter(asked.rows.device)
        posterior._prepared = within_memory(asked, make_plan(asked), lambda plan: build(asked, plan, meter))
    return self


def check_same_data(rows: JacobianRows, measured: Measured) -> None:
    """Refuse the rows of other data than a posterior was fitted to."""
    n_rows = rows.examples.n_all * rows.rows_per_example
    if n_rows != measured.n_rows:
        msg = f"The posterior was fitted to {measured.n_rows} rows, these data have {n_rows}: pass those again."
        raise DataError(msg)
    if rows.examples.fingerprint() != measured.data:
        msg = "These are other data than the posterior was fitted to: pass those again, in the same order."
        raise DataError(msg)
