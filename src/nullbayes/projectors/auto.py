"""The choice of a projector by rows, parameters, samples, device and memory, with its reason.

It compares the bytes and seconds that :mod:`nullbayes.projectors.cost_model` counts for every method and storage.
"""

from __future__ import annotations

import math

import torch

from nullbayes.errors import SettingsError
from nullbayes.limits import (
    RowCosts,
    Storage,
)
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.cost_model import HALF_RTOL, CostModel, vector_bytes
from nullbayes.projectors.direct import Direct
from nullbayes.projectors.plan import Plan

_CLEARLY = 1.05  # by which another storage has to be sooner than entries on the device, which are exact


def choose(rows: Rows, *, n_samples: int, memory_limit: int, rtol: float = 1e-2, host_limit: int = 0) -> Plan:
    """Pick the projector that reaches the tolerance soonest within the memory limit, by a count of the work.

    Parameters
    ----------
    rows : Rows
        The problem; only ``rows.costs(storage)`` is called.
    n_samples : int
        Vectors to be projected together.
    memory_limit, host_limit : int
        Bytes that may be used on the device and, if it has memory of its own, on the host.
    rtol : float
        The tolerance.

    Returns
    -------
    Plan
        The fastest plan that fits.

    Raises
    ------
    SettingsError
        If no plan fits; the message names the least limit that would do.

    Examples
    --------
    >>> import nullbayes as nb
    >>> plan = choose(nb.DenseRows(torch.eye(600, 5000)), n_samples=10, memory_limit=2**30)
    >>> plan.projector.alternating.block_rows, plan.storage
    (600, 'device')
    """
    plans = _plans(rows, n_samples, memory_limit, rtol, host_limit)
    fitting = [plan for plan in plans if plan.peak_bytes <= memory_limit]
    if fitting:
        return min(fitting, key=lambda plan: plan.seconds * (1.0 if plan.storage == "device" else _CLEARLY))
    costs = rows.costs()
    vectors = vector_bytes(costs, n_samples)
    least = f"{math.ceil(min(plan.peak_bytes for plan in plans) / 2**20)} MiB"
    limit = f"the memory limit of {memory_limit / 2**20:.1f} MiB"
    if vectors >= memory_limit:
        msg = (
            f"{n_samples} samples of {costs.n_columns:,} parameters{_each(costs)} alone need "
            f"{vectors / 2**20:.1f} MiB, over {limit}: take fewer samples or raise memory_limit; "
            f"the least that would do is {least}."
        )
        raise SettingsError(msg)
    msg = (
        f"No block of the rows fits within {limit}; the least that would do is {least}: raise memory_limit, or use "
        "projector=nb.projectors.Lanczos(rank=...)."
    )
    raise SettingsError(msg)


def _each(costs: RowCosts) -> str:
    return " per process" if costs.column_parts > 1 else ""


def least_bytes(rows: Rows, *, n_samples: int, rtol: float = 1e-2, host_limit: int = 0) -> int:
    """Return the least memory limit that :func:`choose` has a plan for.

    Parameters
    ----------
    rows, n_samples, rtol, host_limit
        As for :func:`choose`.

    Returns
    -------
    int
        A number of bytes.

    Examples
    --------
    >>> import nullbayes as nb
    >>> rows = nb.DenseRows(torch.eye(600, 5000))
    >>> limit = least_bytes(rows, n_samples=10)
    >>> choose(rows, n_samples=10, memory_limit=limit).peak_bytes <= limit
    True
    """
    return min(plan.peak_bytes for plan in _plans(rows, n_samples, 0, rtol, host_limit))


def _plans(rows: Rows, n_samples: int, memory_limit: int, rtol: float, host_limit: int) -> list[Plan]:
    """Return every plan, whether it fits in the limit or not; only the direct one, if it fits on the device."""
    plans: list[Plan] = []
    for storage in _storages(rows.costs(), rtol, host_limit):
        plans += CostModel(rows.costs(storage), n_samples, memory_limit, rtol).plans()
        if isinstance(plans[0].projector, Direct) and plans[0].peak_bytes <= memory_limit:
            break  # other ways to store the rows only take longer
    return plans


def _storages(costs: RowCosts, rtol: float, host_limit: int) -> list[Storage]:
    """Return the ways to store the rows."""
    options: list[Storage] = ["device"]
    if costs.full_bytes == 0:
        return options
    if costs.dtype == torch.float32 and rtol >= HALF_RTOL:
        options.append("half")
    if 0 < 2 * costs.compact_bytes <= costs.full_bytes and costs.processes == costs.column_parts == 1:
        options.append("factors")
    if costs.device.type == "cuda" and costs.full_bytes <= host_limit:
        options.append("host")
    return [*options, "recompute", "matrix_free"]
