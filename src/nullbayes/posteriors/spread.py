"""How far the training outputs, and the training losses, vary under the samples of a posterior."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.rows import Rows

_CONSTANT = 1e-6  # of the largest spread
_MEASURED = 1024  # training examples on which the change of the outputs is measured, where rows do not tell


def train_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> tuple[float, float | None]:  # (S, P)
    """Return the standard deviation of the training outputs that count, over samples in these directions.

    And, of several outputs in units of their own, the largest part of its spread that one of them varies by. ``rows``
    are those of ``jacobian`` as they are held. Where they are the outputs' own they tell; else it is measured on some
    of the examples.
    """
    own = isinstance(jacobian, OutputJacobian) and not jacobian.hessian
    stds = jacobian.output_stds
    if own and (stds is None or len(stds) == 1):
        assert isinstance(jacobian, OutputJacobian)
        std = float((rows.norms(directions).square().mean() / jacobian.n_counted).sqrt())
        return std, None
    total, n_counted, each = 0.0, 0, None
    for changes, counted in _own_changes(rows, directions, jacobian) if own else _changes(jacobian, directions):
        total += float(changes.square().sum())
        n_counted += counted
        if stds is not None:
            squares = changes.square().sum((0, 1))
            each = squares if each is None else each + squares
    std = math.sqrt(total / max(1, n_counted) / len(directions))
    if each is None or stds is None or len(stds) == 1:
        return std, None
    apart = (each * len(stds) / max(1, n_counted) / len(directions)).sqrt()
    return std, worst_ratio(apart, stds)


def worst_ratio(stds: Tensor, spreads: Tensor) -> float | None:  # (O,), (O,)
    """Return the largest standard deviation as a part of the spread of its output; one that is constant has none."""
    alive = spreads > _CONSTANT * spreads.max()
    return float((stds[alive] / spreads[alive]).max()) if bool(alive.any()) else None


def _own_changes(rows: Rows, directions: Tensor, jacobian: JacobianRows) -> Iterator[tuple[Tensor, int]]:
    """Yield the change of all outputs, (S, n, O), from the rows that are the outputs' own."""
    changes = rows.mv(directions).double().view(len(directions), -1, jacobian.rows_per_example)
    yield changes, changes[0].numel()


def _changes(jacobian: JacobianRows, directions: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Iterate over the change of outputs that count, (S, n, ...), on some examples."""
    examples = jacobian.examples
    step = max(1, len(examples) // _MEASURED) * 32
    at_once = min(32, jacobian.examples_within(len(directions)))
    for start in range(0, len(examples), step):
        for a, b in examples.ranges(at_once, start, min(start + 32, len(examples))):
            x, y = examples.read(a, b)
            own, changes = linearized(jacobian.network, x, directions)
            counted = jacobian.likelihood.counted(own, y)
            changes = changes.double() if counted is None else changes.double() * counted
            yield changes, own.numel() if counted is None else int(counted.sum())


def loss_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float | None:  # (S, P)
    """Return the standard deviation of the training losses to first order, where the rows are those of losses."""
    if not isinstance(jacobian, LossJacobian):
        return None
    return float((rows.norms(directions).square().mean() / rows.n_rows).sqrt())
