"""Out-of-distribution scores: one number per input or per position, which is higher for stranger inputs.

| score | what it measures |
|---|---|
| ``max_variance``, ``sum_variance`` | how far the posterior's samples disagree about the outputs |
| ``max_prob_variance`` | how far they disagree about the probabilities |
| ``mutual_information`` | the part of the entropy that is due to their disagreement |
| ``entropy``, ``generalized_entropy``, ``max_probability`` | how undecided the mean prediction is |
| ``energy``, ``max_logit`` | how small the logits are |

Scores of confidence have the opposite sign. Each score is computed at every position of the outputs first, and then
pooled to one number per input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import DataError, LikelihoodError, SettingsError, warn
from nullbayes.likelihoods import Likelihood
from nullbayes.predictive.prediction import Prediction

_PER = ("input", "position")
_GAMMA, _LARGEST = 0.1, 100  # of the generalized entropy, as in its paper


def _variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:  # (N, ...)
    noise = prediction.noise
    if noise is None or noise.numel() == 1:
        return prediction.variance
    return prediction.variance / noise  # outputs may have different units


def _max_variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    return likelihood.at_positions(_variance(prediction, likelihood), largest=True)


def _sum_variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    return likelihood.at_positions(_variance(prediction, likelihood), largest=False)


def _max_prob_variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    return likelihood.at_positions(likelihood.probabilities(prediction.samples).var(0), largest=True)


def _entropy(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    assert prediction.probs is not None
    return likelihood.at_positions(likelihood.entropy_terms(prediction.probs), largest=False)


def _mutual_information(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    probs = likelihood.probabilities(prediction.samples)
    terms = likelihood.entropy_terms(probs.mean(0)) - likelihood.entropy_terms(probs).mean(0)
    return likelihood.at_positions(terms, largest=False).clamp_min(0.0)  # rounding may make it negative


def _energy(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    return likelihood.over_choices(-likelihood.choices(prediction.mean).logsumexp(-1))


def _max_logit(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    return likelihood.over_choices(-likelihood.choices(prediction.mean).amax(-1))


def _max_probability(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    assert prediction.probs is not None
    choices = likelihood.choice_probabilities(prediction.probs)
    return likelihood.over_choices(_others(choices))


def _others(choices: Tensor) -> Tensor:  # (..., C) -> (...)
    """Return one minus the largest probability, which loses all digits at p = 1 if it is computed so."""
    return choices.scatter(-1, choices.argmax(-1, keepdim=True), 0.0).sum(-1)


def _generalized_entropy(
    prediction: Prediction, likelihood: Likelihood, gamma: float = _GAMMA, largest: int = _LARGEST
) -> Tensor:
    # of the mean outputs at temperature 1: what flattens the probabilities also flattens their differences
    choices = likelihood.choices(prediction.mean).double().softmax(-1)
    top = choices.topk(min(largest, choices.shape[-1]), dim=-1).values
    rest = (1.0 - top).clamp_min(0.0)
    rest[..., 0] = _others(choices)
    return likelihood.over_choices((top**gamma * rest**gamma).sum(-1).to(prediction.mean.dtype))


@dataclass(frozen=True)
class _Score:
    """How a score is computed at each position (N, ...), and whether the largest of them counts, or their mean."""

    at_positions: Callable[..., Tensor]  # of a prediction, a likelihood and settings
    largest: bool = False
    of_probabilities: bool = True  # only for likelihoods that have them


_SCORES = {
    "max_variance": _Score(_max_variance, largest=True, of_probabilities=False),  # the paper's text
    "sum_variance": _Score(_sum_variance, of_probabilities=False),
    "max_prob_variance": _Score(_max_prob_variance, largest=True),  # the authors' code
    "entropy": _Score(_entropy),  # of the mean prediction
    "mutual_information": _Score(_mutual_information),
    "energy": _Score(_energy),  # Liu et al. (2020)
    "max_logit": _Score(_max_logit),  # Hendrycks et al. (2022)
    "max_probability": _Score(_max_probability),  # one minus it: Hendrycks and Gimpel (2017)
    "generalized_entropy": _Score(_generalized_entropy),  # Liu, Lochman and Zach (2023)
}
SCORES = tuple(_SCORES)
WITHOUT_PROBABILITIES = tuple(name for name, kind in _SCORES.items() if not kind.of_probabilities)
OF_MEAN: tuple[str, ...] = (  # scores that need no samples
    "max_probability", "max_logit", "energy", "generalized_entropy", "entropy",
)  # fmt: skip


def scores_of(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the scores that predictions of a likelihood have."""
    return SCORES if likelihood.has_probabilities else WITHOUT_PROBABILITIES


def default_score(likelihood: Likelihood) -> str:
    """Return the score of a posterior that is not calibrated.

    It is the one that was closest to "nowhere below the largest probability" on many networks: images, sentences,
    tables, series and sets (``docs/how-scores-were-chosen.md``). Others are better on some networks and much worse on
    others.
    """
    return "entropy" if likelihood.has_probabilities else "max_variance"


def score(
    prediction: Prediction, likelihood: Likelihood, kind: str, per: str = "input", **settings: float
) -> Tensor:  # (N,) or (N, ...)
    """Return one score per input or per position; high scores mean out-of-distribution.

    ``settings`` are those of the score, where it has any.

    Scores do not depend on the units of the outputs of a regression, nor on the length of an input. Masked positions do
    not count; with ``per="position"`` their score is NaN.
    """
    if kind not in SCORES:
        msg = f"kind must be one of {', '.join(SCORES)}, not {kind!r}."
        raise SettingsError(msg)
    check_per(per)
    if kind not in WITHOUT_PROBABILITIES and prediction.probs is None:
        other = ": use 'max_variance'" if len(prediction.samples) > 1 else ""
        msg = f"kind={kind!r} needs probabilities, which a {likelihood.name} likelihood does not have{other}."
        raise LikelihoodError(msg)
    found = _SCORES[kind]
    return pooled(found.at_positions(prediction, likelihood, **settings), prediction.mask, per, largest=found.largest)


def check_per(per: str) -> None:
    """Refuse anything but "input" and "position"."""
    if per not in _PER:
        hint = ': per="position" gives one score per token, pixel or time step' if isinstance(per, str) else ""
        msg = f"per must be one of {', '.join(_PER)}, not {per!r}{hint}."
        raise SettingsError(msg)


def pooled(values: Tensor, mask: Tensor | None, per: str = "input", *, largest: bool = False) -> Tensor:  # (N, ...)
    """Return the scores of positions, or combine those that count into one score per input."""
    if per == "position":
        return values if mask is None else values.masked_fill(~mask, torch.nan)
    if values.ndim == 1:
        return values
    flat = values.flatten(1)
    if mask is None:
        return flat.amax(1) if largest else flat.sum(1) / flat.shape[1]
    counted = mask.flatten(1)
    if not torch.compiler.is_exporting() and not bool(counted.any(1).all()):  # a program does not look at values
        empty = int((~counted.any(1)).nonzero()[0])
        msg = (
            f"The mask leaves nothing of input {empty}: every input must have a position that counts. If it is all "
            "padding, leave it out."
        )
        raise DataError(msg)
    if largest:
        return flat.masked_fill(~counted, -torch.inf).amax(1)
    return flat.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)


def warn_of_padding(likelihood: Likelihood, prediction: Prediction) -> None:
    """Warn that padding may be part of the scores of a prediction with positions."""
    if len(likelihood.positions(prediction.mean)) < 2:
        return
    if likelihood.some_ignored and prediction.mask is None:
        message = (
            "Training targets ignored some positions (padding?), but these inputs come without a mask, so every "
            "position counts in their scores."
        )
    elif likelihood.more_ignored:
        message = (
            "Training targets ignored positions that attention_mask counts (special tokens, parts of words?). Nothing "
            "holds the outputs there, and they count in these scores."
        )
    else:
        return
    warn(f'{message} Pass mask=..., true where a position counts, or mask="all".')
