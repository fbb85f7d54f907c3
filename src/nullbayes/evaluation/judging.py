r"""How good predictions are: sums over the targets of each example, and how often confidence is right.

Only one number per example and figure is kept, whatever the number of classes and positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import DataError, LikelihoodError
from nullbayes.likelihoods import Likelihood
from nullbayes.metrics import aurc
from nullbayes.predictive import Prediction

N_BINS = 15  # of the expected calibration error, as in `nullbayes.metrics.ece`
LEVEL = 0.9  # of the intervals of a regression
_LEVELS = tuple((i + 1) / 20 for i in range(19))  # of the diagram of coverage


@dataclass(frozen=True)
class Judged:
    """Predictions, compared with their targets."""

    counts: Tensor  # (N,): targets of each example that count
    sums: dict[str, Tensor]  # (N,): over these targets
    losses: Tensor  # (N,): mean loss of each example, for the selective risk
    reliability: Tensor | None  # (3, B): numbers of targets, of those met, and of those that should be met

    def take(self, index: Tensor) -> Judged:
        """Return some of the examples, without the reliability of all."""
        sums = {name: values[index] for name, values in self.sums.items()}
        return Judged(self.counts[index], sums, self.losses[index], None)

    def figures(self, scores: Tensor) -> dict[str, float]:
        """Return the figures of merit; ``scores`` (N,) say in which order predictions are rejected."""
        total = max(1.0, float(self.counts.sum()))
        means = {name: float(values.sum()) / total for name, values in self.sums.items()}
        if "squared_error" in means:
            means["rmse"] = math.sqrt(means.pop("squared_error"))
        if self.reliability is not None and "accuracy" in means:
            counts, met, promised = self.reliability
            means["ece"] = float((met - promised).abs().sum() / counts.sum())
        counted = self.counts > 0
        return means | {"aurc": aurc(scores[counted], self.losses[counted])} if bool(counted.any()) else means


def judge(prediction: Prediction, likelihood: Likelihood, targets: Tensor) -> Judged:
    """Compare the prediction for some examples with their targets."""
    likelihood.check(prediction.mean, targets)
    if prediction.probs is not None:
        return _judge_classes(prediction.probs.cpu(), likelihood, targets.cpu())
    if prediction.noise is not None:
        return _judge_numbers(prediction, likelihood, targets)
    losses = likelihood.loss(prediction.mean, targets).detach().double().cpu()
    return Judged(torch.ones_like(losses), {}, losses, None)


def joined(parts: Sequence[Judged]) -> Judged:
    """Put the examples of several batches together."""
    tables = [part.reliability for part in parts if part.reliability is not None]
    together = Judged(
        counts=torch.cat([part.counts for part in parts]),
        sums={name: torch.cat([part.sums[name] for part in parts]) for name in parts[0].sums},
        losses=torch.cat([part.losses for part in parts]),
        reliability=torch.stack(tables).sum(0) if tables else None,
    )
    if not bool((together.counts > 0).any()):
        msg = "Every target of in_data is one to be ignored (ignore_index): there is nothing to compare with."
        raise DataError(msg)
    return together


def _judge_classes(probs: Tensor, likelihood: Likelihood, targets: Tensor) -> Judged:
    if targets.is_floating_point() and not likelihood.independent_outputs:
        msg = "The targets are probabilities, and figures of merit need classes: pass integer labels."
        raise LikelihoodError(msg)
    floor = torch.finfo(probs.dtype).tiny  # as in `nullbayes.metrics.nll`
    wide = probs.double()
    binary = likelihood.independent_outputs
    choices = torch.stack((1.0 - wide, wide), dim=-1) if binary else likelihood.choice_probabilities(wide)
    table, n = choices.reshape(-1, choices.shape[-1]), len(probs)
    labels = targets.reshape(-1).long()
    counted = labels != getattr(likelihood, "ignore_index", -100)
    labels = labels.masked_fill(~counted, 0)
    predicted = (table[:, 1] >= 0.5).long() if binary else table.argmax(1)
    correct, confidence = (predicted == labels).double(), table.amax(1)
    nll = -table.gather(1, labels[:, None])[:, 0].clamp(min=floor).log()
    edges = torch.arange(1, N_BINS, dtype=torch.float64, device="cpu") / N_BINS
    bins, weights = torch.bucketize(confidence, edges), counted.double()
    columns = (weights, weights * correct, weights * confidence)
    reliability = torch.stack([torch.bincount(bins, values, minlength=N_BINS) for values in columns])
    counts = _summed(weights, n)
    right = _summed(weights * correct, n)
    sums = {"nll": _summed(weights * nll, n), "accuracy": right}
    return Judged(counts, sums, 1.0 - right / counts.clamp(min=1.0), reliability)


def _judge_numbers(prediction: Prediction, likelihood: Likelihood, targets: Tensor) -> Judged:
    assert prediction.noise is not None
    nll = likelihood.nll_terms(prediction.mean, targets, prediction.variance.double()).cpu().flatten(1)
    mean, n = prediction.mean.double().cpu(), len(nll)
    squared = (mean - targets.cpu().reshape(mean.shape).double()).square().flatten(1)
    lower, upper = (bound.double().cpu() for bound in prediction.interval(LEVEL))
    y = targets.cpu().reshape(mean.shape).double()
    inside = ((lower <= y) & (y <= upper)).double().flatten(1)
    total = (prediction.variance + prediction.noise).double().cpu().flatten(1)
    needed = torch.erf((squared / total / 2.0).sqrt())  # the level of the smallest interval that holds the target
    levels = torch.tensor(_LEVELS, dtype=torch.float64, device="cpu")
    met = (needed.flatten()[:, None] <= levels).double().sum(0)
    size = torch.full_like(met, float(needed.numel()))
    counts = torch.full((n,), float(nll.shape[1]), dtype=torch.float64, device="cpu")
    sums = {"squared_error": squared.sum(1), "nll": nll.sum(1), "coverage": inside.sum(1)}
    return Judged(counts, sums, squared.mean(1), torch.stack([size, met, levels * size]))


def _summed(values: Tensor, n: int) -> Tensor:  # (n * positions,) -> (n,)
    return values.reshape(n, -1).sum(1)
