"""What is measured on samples: how outputs and losses vary on the training data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors.arguments import Noise
from nullbayes.posteriors.measured import Measured
from nullbayes.posteriors.plan import FitPlan, FitRequest, described
from nullbayes.projectors import Info

_CONSTANT = 1e-6  # of the largest spread
_MEASURED = 1024  # training examples on which the change of the outputs is measured, where the rows do not tell


@dataclass(frozen=True)
class Prepared:
    """What a fit has built on the training data, and needs again to draw more samples.

    ``jacobian`` are the rows as they can be formed, ``rows`` the same as they are held, and ``state`` is what the
    projector has prepared.
    """

    request: FitRequest
    plan: FitPlan
    jacobian: JacobianRows
    rows: Rows
    state: Any


def measure(prepared: Prepared, noise: Noise, directions: Tensor, info: Info, estimates: Tensor) -> Measured:
    """Measure new directions (S, P); ``estimates`` are those of the dimension of the null space."""
    jacobian, plan, n = prepared.jacobian, prepared.plan, len(directions)
    std, ratio = train_std(jacobian, prepared.rows, directions)
    return Measured(
        projector=type(plan.projector).__name__,
        reason=plan.reason,
        route=jacobian.route,
        n_data=jacobian.examples.n_all,
        n_rows=prepared.rows.n_rows,
        n_counted=jacobian.n_counted,
        data=jacobian.examples.fingerprint(),
        output_std=jacobian.output_std,
        seed=noise.seed,
        based=noise.base is not None,
        tolerance=plan.projector.rtol,
        residual=tuple(info.residual[:n].tolist()),
        converged=bool(info.converged[:n].all()),
        sweeps=info.sweeps,
        sweeps_per_sample=tuple(info.sweeps_per_sample[:n].tolist()),
        settings=described(plan.projector),
        rank=info.rank,
        traces=tuple(estimates.tolist()),
        train_std=std,
        worst_ratio=ratio,
        train_loss_std=loss_std(jacobian, prepared.rows, directions),
        seconds={},
        peak_memory=None,
        promise=None,
        notes=plan.notes,
    )


def train_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> tuple[float, float | None]:  # (S, P)
    """Return the standard deviation of the training outputs that count, and the worst ratio to an output's spread.

    ``rows`` are those of ``jacobian`` as they are held. If they are the outputs' own, they tell; otherwise the change
    of the outputs is measured on some of the examples. There is no ratio for a single output, or for classes.
    """
    own = isinstance(jacobian, OutputJacobian) and not jacobian.hessian
    stds = jacobian.output_stds
    if own and (stds is None or len(stds) == 1):
        return float((rows.norms(directions).square().mean() / jacobian.n_counted).sqrt()), None
    total, n_counted, each = 0.0, 0, None
    for changes, counted in _own_changes(rows, directions, jacobian) if own else _changes(jacobian, directions):
        total += float(changes.square().sum())
        n_counted += counted
        if stds is not None:
            squares = changes.square().sum((0, 1))
            each = squares if each is None else each + squares
    if not own:  # else the changes are those of all processes
        total, n_counted = map(sum, zip(*jacobian.examples.group.gather((total, n_counted)), strict=True))
        each = None if each is None else jacobian.examples.group.sum(each)
    std = math.sqrt(total / max(1, n_counted) / len(directions))
    if each is None or stds is None or len(stds) == 1:
        return std, None
    return std, worst_ratio((each * len(stds) / max(1, n_counted) / len(directions)).sqrt(), stds)


def worst_ratio(stds: Tensor, spreads: Tensor) -> float | None:  # (O,), (O,)
    """Return the largest ratio of a standard deviation to the spread of its output; constant outputs have none."""
    alive = spreads > _CONSTANT * spreads.max()
    return float((stds[alive] / spreads[alive]).max()) if bool(alive.any()) else None


def _own_changes(rows: Rows, directions: Tensor, jacobian: JacobianRows) -> Iterator[tuple[Tensor, int]]:
    """Yield the change of all outputs, (S, n, O), and their number."""
    changes = rows.mv(directions).double().view(len(directions), -1, jacobian.rows_per_example)
    yield changes, changes[0].numel()


def _changes(jacobian: JacobianRows, directions: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Iterate over the change of the outputs that count, (S, n, ...), on some examples, and their number."""
    examples = jacobian.examples
    step = max(1, examples.n_all // _MEASURED) * 32
    at_once = min(32, jacobian.examples_within(len(directions)))
    for start in range(0, len(examples), step):
        for a, b in examples.ranges(at_once, start, min(start + 32, len(examples))):
            x, y = examples.read(a, b)
            own, changes = linearized(jacobian.network, x, directions)
            counted = jacobian.likelihood.counted(own, y)
            changes = changes.double() if counted is None else changes.double() * counted
            yield changes, own.numel() if counted is None else int(counted.sum())


def loss_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float | None:  # (S, P)
    """Return the standard deviation of the training losses to first order, if the rows are those of losses."""
    if not isinstance(jacobian, LossJacobian):
        return None
    return float((rows.norms(directions).square().mean() / rows.n_rows).sqrt())
