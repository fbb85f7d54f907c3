"""How far outputs vary: over the training data, and on them under the samples of a posterior."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.rows import Rows

_ANSWERED = {"cpu": 64, "cuda": 1024}  # examples that the network answers at a time
_MEASURED = 1024  # training examples on which the change of the outputs is measured, where rows do not tell


def of_outputs(outputs: Tensor, counted: Tensor | None = None) -> float:  # (N, ...)
    """Return the root mean square standard deviation over examples of outputs, or of those that count."""
    values = outputs.double()
    if counted is None:
        return float(values.var(0, unbiased=False).mean().sqrt())
    weights = counted.double()
    mean = (values * weights).sum(0) / weights.sum(0).clamp_min(1.0)
    return float((((values - mean).square() * weights).sum() / weights.sum()).sqrt())


def of_training_outputs(jacobian: JacobianRows) -> float:
    """Return the same for the outputs on all training data."""
    examples, outputs, targets = jacobian.examples, [], []
    for start, stop in examples.ranges(_ANSWERED.get(examples.device.type, 64)):
        x, y = examples.read(start, stop)
        outputs.append(jacobian.network.outputs(x))
        targets.append(y)
    every = torch.cat(outputs)
    return of_outputs(every, jacobian.likelihood.counted(every, torch.cat(targets)))


def left_on_training_outputs(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float:  # (S, P)
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
