"""How far a prediction is from its target, and which targets a limit on that distance leaves.

Outputs with positions (tokens, pixels) are compared at one random position of each input, so that the held-out numbers
stay exchangeable with those of a random position of a new input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods import Classification, Likelihood, Regression
from nullbayes.predictive import Prediction


def errors(
    likelihood: Likelihood, prediction: Prediction, targets: Tensor, generator: torch.Generator
) -> Tensor | None:  # (n,) or (n, O)
    """Return how far predictions are from their targets; None where no such distance is defined.

    - classes: minus the probability of the right class; several labels: minus the smallest probability of those that
      apply;
    - numbers: the distance from the mean over the standard deviation of a new target, for each output.
    """
    if prediction.noise is not None:
        total = (prediction.variance + prediction.noise).sqrt()
        found = (targets.reshape(prediction.mean.shape) - prediction.mean).abs() / total
        if found.ndim == 2:
            return found
        counts = torch.ones_like(found, dtype=torch.bool) if prediction.mask is None else prediction.mask
        return one_position(found, counts, generator)
    if prediction.probs is None or (isinstance(likelihood, Classification) and targets.is_floating_point()):
        return None
    choices = likelihood.choice_probabilities(prediction.probs)  # (n, ..., C)
    if likelihood.name == "multilabel" and prediction.probs.ndim == 2:
        applies = targets.reshape(prediction.probs.shape).bool()
        return -prediction.probs.masked_fill(~applies, torch.inf).amin(1)
    labels = targets.reshape(choices.shape[:-1]).long()
    counts = labels != likelihood.ignore_index if isinstance(likelihood, Classification) else labels >= 0
    counts = counts if prediction.mask is None else counts & prediction.mask.reshape(counts.shape)
    found = -choices.gather(-1, labels.masked_fill(~counts, 0)[..., None])[..., 0]
    if found.ndim == 2 and likelihood.name == "binary":
        return found[:, 0]
    return found.masked_fill(~counts, torch.nan) if found.ndim == 1 else one_position(found, counts, generator)


def one_position(values: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:  # (n, ...) -> (n,)
    """Return the value at a random position of each input among those that count; NaN where none does."""
    keys = torch.rand(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(values.device)
    at = keys.masked_fill(~counts, -1.0).flatten(1).argmax(1, keepdim=True)
    return values.masked_fill(~counts, torch.nan).flatten(1).gather(1, at)[:, 0]


def noise(likelihood: Likelihood) -> tuple[float, ...]:
    """Return the noise of a regression, as far as it is known; else nothing."""
    found = likelihood.sigma_noise if isinstance(likelihood, Regression) else None
    return () if found is None else found if isinstance(found, tuple) else (found,)


def check_labels(likelihood: Likelihood) -> None:
    """Refuse a likelihood without labels."""
    if not likelihood.has_probabilities:
        other = ": use predict_interval" if likelihood.name == "regression" else ""
        msg = f"Label sets are for likelihoods with classes, not for {likelihood.name}{other}."
        raise LikelihoodError(msg)


def check_numbers(likelihood: Likelihood) -> None:
    """Refuse a likelihood without noise."""
    if likelihood.noise_variance(torch.zeros(1, 1, device="cpu")) is None:
        other = ": use predict_set" if likelihood.has_probabilities else ""
        msg = f"Intervals are for regressions, not for {likelihood.name}{other}."
        raise LikelihoodError(msg)


def label_sets(likelihood: Likelihood, prediction: Prediction, limit: Tensor) -> Tensor:  # bool
    """Return which labels have an error up to a limit."""
    assert prediction.probs is not None
    if likelihood.name == "multilabel" and prediction.probs.ndim == 2:
        return -prediction.probs <= limit
    choices = likelihood.choice_probabilities(prediction.probs)
    inside = -choices <= limit
    if isinstance(likelihood, Classification):
        return inside.movedim(-1, likelihood.class_dim or -1)
    return inside[:, 0] if inside.ndim == 3 else inside


def interval(prediction: Prediction, limit: Tensor) -> tuple[Tensor, Tensor]:  # (n, ...) each
    """Return the bounds within which targets have an error up to a limit."""
    assert prediction.noise is not None
    half = limit.to(prediction.mean) * (prediction.variance + prediction.noise).sqrt()
    return prediction.mean - half, prediction.mean + half
