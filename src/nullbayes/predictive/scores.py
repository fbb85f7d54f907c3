"""One number an input, or one a position: higher is stranger."""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.errors import DataError, LikelihoodError, SettingsError
from nullbayes.likelihoods import Likelihood
from nullbayes.predictive.prediction import Prediction

SCORES = ("max_variance", "sum_variance", "max_prob_variance", "entropy", "mutual_information")
PER = ("input", "position")


def score(prediction: Prediction, likelihood: Likelihood, kind: str, per: str = "input") -> Tensor:  # (N,) or (N, ...)
    """Return one number an input, higher where it is stranger.

    ``max_variance`` (the paper's text) and ``sum_variance`` are of the outputs; ``max_prob_variance`` (the authors'
    code) of the probabilities; ``entropy`` is that of the mean prediction, ``mutual_information`` its part that the
    samples disagree on.

    The variances of a regression with several outputs are relative to the noise of each, which makes their units the
    same. Where outputs have positions, the score of an input is the largest of its positions for the two that begin
    with "max", and their mean for the others, so that it does not grow with the length of the input. Positions that
    the prediction's mask leaves out do not count. ``per="position"`` gives the score of each, NaN where it is masked.
    """
    if kind not in SCORES:
        msg = f"kind must be one of {', '.join(SCORES)}, not {kind!r}."
        raise SettingsError(msg)
    if per not in PER:
        msg = f"per must be one of {', '.join(PER)}, not {per!r}."
        raise SettingsError(msg)
    if kind not in ("max_variance", "sum_variance") and prediction.probs is None:
        msg = f"kind={kind!r} needs probabilities, which a {likelihood.name} likelihood has not: use 'max_variance'."
        raise LikelihoodError(msg)
    values = likelihood.at_positions(_of_outputs(prediction, likelihood, kind), largest=kind.startswith("max"))
    values = values.clamp_min(0.0) if kind == "mutual_information" else values  # which rounding may make negative
    return pooled(values, prediction.mask, kind, per)


def pooled(values: Tensor, mask: Tensor | None, kind: str, per: str = "input") -> Tensor:  # (N, ...)
    """Return the scores of positions as they are, or one for each input, of those positions that count."""
    if per == "position":
        return values if mask is None else values.masked_fill(~mask, torch.nan)
    if values.ndim == 1:
        return values
    flat = values.flatten(1)
    counted = torch.ones_like(flat, dtype=torch.bool) if mask is None else mask.flatten(1)
    if not bool(counted.any(1).all()):
        empty = int((~counted.any(1)).nonzero()[0])
        msg = f"The mask leaves nothing of input {empty}: every input must have a position that counts."
        raise DataError(msg)
    if kind.startswith("max"):
        return flat.masked_fill(~counted, -torch.inf).amax(1)
    return flat.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)


def _of_outputs(prediction: Prediction, likelihood: Likelihood, kind: str) -> Tensor:  # (N, ...)
    """Return what each output adds to a score."""
    if kind in ("max_variance", "sum_variance"):
        noise = prediction.noise  # of several outputs in units of their own: else the largest unit would speak alone
        return prediction.variance if noise is None or noise.numel() == 1 else prediction.variance / noise
    if kind == "entropy":
        assert prediction.probs is not None
        return likelihood.entropy_terms(prediction.probs)
    probs = likelihood.probabilities(prediction.samples)
    if kind == "max_prob_variance":
        return probs.var(0)
    return likelihood.entropy_terms(probs.mean(0)) - likelihood.entropy_terms(probs).mean(0)
