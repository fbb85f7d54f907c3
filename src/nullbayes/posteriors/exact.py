r"""Variances without Monte Carlo error: rows of new inputs, through the maps that took noise to the samples.

A sample is :math:`v = T \varepsilon`, and the variance of the output with the row :math:`w` is
:math:`\|T^\top w\|^2`. A direct projector has one map. An iterative one stops when the noise has met the tolerance,
which rows of :math:`J(x)` meet long before: they are therefore taken through as many steps as the samples, each as long
as theirs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ConvergenceWarning
from nullbayes.jacobian.batches import n_examples, take_examples
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import output_rows
from nullbayes.posteriors.noise import normal
from nullbayes.projectors import Outcome, Projector, StepSchedule

_LEADERS = 30  # samples whose steps are taken
_VECTORS = 10  # in memory for each row that is projected


class ExactVariances:
    """Computes them, once the steps of the samples are known.

    Parameters
    ----------
    network : Network
        Whose outputs.
    projector, state
        As they projected the samples.
    report
        What the fit has measured, with the seed of its samples. A fit that did not converge, because it was interrupted
        or its sweeps ran out, has the sweeps that it had; those of another projector say nothing.
    working_bytes : int
        For rows in work; as many as there are samples are always projected together.
    """

    def __init__(
        self, network: Network, projector: Projector, state: Any, report: Mapping[str, Any], *, working_bytes: int
    ) -> None:
        self.network, self.projector, self.state = network, projector, state
        few = min(_LEADERS, len(report["residual"]))
        self.at_once = max(few, working_bytes // (_VECTORS * network.n_parameters * network.dtype.itemsize))
        ended = not report["converged"] and report["projector"] == type(projector).__name__
        noise = normal(network, report["seed"], 0, few)
        sweeps = _sweeps(projector, state, noise, report["sweeps"] if ended else None)
        self.schedules = [
            (sweeps.count(count) / few, StepSchedule(noise[sweeps.index(count)][None].clone(), count))
            for count in dict.fromkeys(sweeps)
        ]  # samples with as many sweeps have the same map, but for the lengths of their steps

    def __call__(self, x: Any) -> Tensor:  # (n, ...)
        """Return the variance of each output at precision 1, the rows of so many inputs at a time as may be."""
        step = max(1, self.at_once // math.prod(self.network.output_shape(x)))
        pieces = [take_examples(x, start, start + step) for start in range(0, n_examples(x), step)]
        return torch.cat([self._squares(output_rows(self.network, piece)) for piece in pieces])

    def _squares(self, rows: Tensor) -> Tensor:  # (n, ..., P) -> (n, ...)
        parts = []
        for some in rows.flatten(0, -2).split(self.at_once):
            squares = [
                share * self.projector.apply_transposed(self.state, schedule, some).square().sum(1)
                for share, schedule in self.schedules
            ]
            parts.append(torch.stack(squares).sum(0))
        return torch.cat(parts).view(rows.shape[:-1])


def _sweeps(projector: Projector, state: Any, noise: Tensor, most: int | None) -> list[int]:
    """Return how many sweeps each sample takes, or took until it was stopped after ``most``."""
    with warnings.catch_warnings():
        if most is not None:  # the fit has warned that it did not converge
            warnings.filterwarnings("ignore", "(?!.*stopped by the user)", ConvergenceWarning)
        info = projector.apply(state, noise).info
    if info.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt  # fewer sweeps are another map
    return [sweeps if most is None else min(sweeps, most) for sweeps in info.sweeps_per_sample.tolist()]
