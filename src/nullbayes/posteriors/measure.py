"""What a fit measures on its training data, at precision 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows, OutputJacobian
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors.base import output_spread

_MEASURED_EXAMPLES = 1024  # training examples on which the change of the outputs is measured, where rows do not tell


def output_std(jacobian: JacobianRows) -> float:
    """Return the spread of the network's own outputs."""
    examples = jacobian.examples
    at_once = 1024 if examples.device.type == "cuda" else 64
    outputs, targets = [], []
    for a, b in examples.ranges(at_once):
        x, y = examples.read(a, b)
        outputs.append(jacobian.network.outputs(x))
        targets.append(y)
    every = torch.cat(outputs)
    return output_spread(every, jacobian.likelihood.counted(every, torch.cat(targets)))


def train_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float:
    """Return the standard deviation that directions leave on the outputs; ``rows`` are the Jacobian's as held."""
    if isinstance(jacobian, OutputJacobian) and not jacobian.hessian:
        return float((rows.norms(directions).square().mean() / jacobian.n_counted).sqrt())
    examples = jacobian.examples
    step = max(1, len(examples) // _MEASURED_EXAMPLES) * 32
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
