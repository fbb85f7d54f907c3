"""The scores of a posterior: which it has, and how each is computed.

The functions with an argument ``self`` are methods of :class:`SamplePosterior`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions import COMBINED as COMBINED
from nullbayes.decisions import combined_score, need_calibration
from nullbayes.errors import SettingsError
from nullbayes.jacobian.batches import is_array
from nullbayes.predictive import (
    SCORES,
    Mask,
    Prediction,
    check_per,
    default_score,
    score,
    scores_of,
    stream,
    warn_of_padding,
)

OwnScore = Callable[[Any, str, Mask], Tensor]  # (inputs, per, mask) -> scores


VARIANCE = "sum_variance"  # of samples, in the combined score: that of all outputs is less noisy than the largest


@dataclass(frozen=True)
class Scoring:
    """Which scores a posterior has.

    Attributes
    ----------
    default : str
        The score of a posterior that is not calibrated.
    kinds : tuple of str
        The scores of its predictions.
    own : mapping of str to callable
        The scores that do not follow from a prediction.
    membership : str or None
        The score that says how far an input is from the training data, as one statistic of the combined score.
    calibrated : str
        The score that ``calibrate`` calibrates by default.
    """

    default: str
    kinds: tuple[str, ...] = SCORES
    own: Mapping[str, OwnScore] = field(default_factory=dict)
    membership: str | None = VARIANCE
    calibrated: str = COMBINED


def scores_of_samples(self: Any) -> Scoring:
    """Return which scores there are of samples alone."""
    return Scoring(default_score(self._likelihood))


def scores(self: Any) -> tuple[str, ...]:
    """The kinds of scores that :meth:`ood_score` takes; "combined" needs :meth:`calibrate` first."""
    scoring: Scoring = self._scoring
    allowed = (*scores_of(self._likelihood), *scoring.own)
    return tuple(dict.fromkeys([*(kind for kind in scoring.kinds if kind in allowed), *scoring.own, COMBINED]))


def ood_score(
    self: Any,
    x: Any,
    kind: str | None = None,
    *,
    per: str = "input",
    mask: Mask = None,
    pred_type: str | None = None,
) -> Tensor:  # (N,) or (N, ...)
    """Return one score per input; higher means that the input is less like the training data.

    Parameters
    ----------
    x, mask, pred_type
        As for :meth:`predict`.
    kind : str, optional
        By default the one that :meth:`calibrate` has calibrated ("combined" unless another was named); before,
        "entropy", or "max_variance" for likelihoods without probabilities.

        - Of the posterior: "max_variance" (over the outputs), "sum_variance", "max_prob_variance",
          "mutual_information". Variances of a regression with several outputs are relative to the noise of each.
        - "relative_variance", between 0 and 1: the variance over that of the same noise before its projection.
        - Of the mean prediction: "entropy", "generalized_entropy", "max_probability" (one minus it), "energy" and
          "max_logit" (minus it).
    per : "input" or "position"
        Where outputs have positions (tokens, pixels), the score of an input is the mean over its positions, and the
        largest of them for "max_variance" and "max_prob_variance"; masked positions do not count. "position" gives the
        score of each position, NaN where it is masked.

    Returns
    -------
    Tensor (N,) or (N, ...)
        The scores, in the order of the inputs.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> (posterior.ood_score(x) > 1e-3).tolist()  # the largest variance, for a regression
    [False, False, True, True]
    """
    check_per(per)
    scoring: Scoring = self._scoring
    kind = _asked(self, scoring, kind, per)
    if kind == COMBINED:
        if pred_type is not None:
            msg = 'The score "combined" is that of the calibration, with its kind of predictions: leave pred_type out.'
            raise SettingsError(msg)
        return combined_score(self, x, per, mask)
    if kind not in scoring.kinds and kind not in scoring.own:
        names = ", ".join(dict.fromkeys([*scoring.kinds, *scoring.own, COMBINED]))
        msg = f"kind must be one of {names} for {type(self).__name__}, not {kind!r}."
        raise SettingsError(msg)
    if kind in scoring.own:
        found = scoring.own[kind](x, per, mask)
    else:
        at_once = is_array(x) or isinstance(x, (tuple, Mapping)) or is_array(mask) or per != "input"
        pieces = [x] if at_once else stream(x, self._network, self._batch_fn, self.n_samples)  # lengths may differ
        predicted = (self._predict(piece, mask=mask, pred_type=pred_type) for piece in pieces)
        found = torch.cat([self._scored(prediction, kind, per, mask) for prediction in predicted])
    if per == "position" and found.ndim == 1:
        msg = 'This network has one prediction per input: there are no positions to score, so leave per="position" out.'
        raise SettingsError(msg)
    return found


def _asked(posterior: Any, scoring: Scoring, kind: str | None, per: str) -> str:
    """Return the score that was asked for; if none was, the calibrated one, or the default before."""
    if kind is not None:
        return kind
    if posterior.calibration is None:
        return scoring.default
    found = need_calibration(posterior)
    return found.position_kind or scoring.default if per == "position" else found.kind


def scored(self: Any, prediction: Prediction, kind: str, per: str, mask: Mask) -> Tensor:
    """Return the score of a prediction; warn where padding may be in it."""
    if mask is None and per == "input":
        warn_of_padding(self._likelihood, prediction)
    return score(prediction, self._likelihood, kind, per)
