"""How far the training outputs, and the training losses, vary under the samples of a posterior."""

from __future__ import annotations

import math

from torch import Tensor

from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.rows import Rows

_MEASURED = 1024  # training examples on which the change of the outputs is measured, where rows do not tell


def train_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float:  # (S, P)
    """Return the standard deviation of the training outputs that count, over samples in these directions.

    ``rows`` are those of ``jacobian`` as they are held. Where they are the outputs' own they tell; else it is measured
    on some of the examples.
    """
    if isinstance(jacobian, OutputJacobian) and not jacobian.hessian:
        return float((rows.norms(directions).square().mean() / jacobian.n_counted).sqrt())
    examples = jacobian.examples
    step = max(1, len(examples) // _MEASURED) * 32
    at_once = min(32, jacobian.examples_within(len(directions)))
    total, n_counted = 0.0, 0
    for start in range(0, len(examples), step):
        for a, b in examples.ranges(at_once, start, min(start + 32, len(examples))):
            x, y = examples.read(a, b)
            own, changes = linearized(jacobian.network, x, directions)
            counted = jacobian.likelihood.counted(own, y)
            changes = changes.double() if counted is None else changes.double() * counted
            total += float(changes.square().sum())
            n_counted += own.numel() if counted is None else int(counted.sum())
    return math.sqrt(total / max(1, n_counted) / len(directions))


def loss_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float | None:  # (S, P)
    """Return the standard deviation of the training losses to first order, where the rows are those of losses."""
    if not isinstance(jacobian, LossJacobian):
        return None
    return float((rows.norms(directions).square().mean() / rows.n_rows).sqrt())
