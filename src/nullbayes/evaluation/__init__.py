"""Evaluation: methods side by side on a person's own data, familiar and strange, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nullbayes.errors import SettingsError
from nullbayes.evaluation.entries import CALIBRATED, Entry, read_familiar, read_methods, read_strangers
from nullbayes.evaluation.figures import figures, intervals
from nullbayes.evaluation.measuring import (
    MethodAnswers,
    ask_familiar,
    ask_strangers,
    costs,
    has_default_precision,
    noise_of,
)
from nullbayes.evaluation.results import Detection as Detection
from nullbayes.evaluation.results import Evaluation as Evaluation
from nullbayes.evaluation.results import EvaluationRow as EvaluationRow
from nullbayes.posteriors.arguments import draw_seed
from nullbayes.predictive import Mask

_ALPHA = 0.05  # of false alarms


def evaluate(
    methods: Mapping[str, Any] | Sequence[Any],
    in_data: Any,
    strangers: Mapping[str, Any] | None = None,
    *,
    scores: str | None = None,
    bootstrap: int = 0,
    mask: Mask = None,
    generator: torch.Generator | None = None,
) -> Evaluation:
    """Compare methods on your own data: predictions of familiar inputs, detection of strangers, and cost.

    Parameters
    ----------
    methods : mapping of str to method, or sequence of methods
        Fitted posteriors, baselines and detectors by name; those of a sequence are named after their classes. A pair
        (method, score) judges a method by that score.
    in_data : loader, pair (x, y), mapping with targets, or dataset
        Familiar data with targets that no method was fitted to, in a fixed order.
    strangers : mapping of str to loader or inputs, optional
        Sets of inputs unlike the familiar ones, by name. Targets are skipped if there are any. Without strangers,
        predictions and costs are compared alone.
    scores : str, optional
        The score that all methods are judged by, or "all" for one row per method and score, named "method: score". By
        default each method is judged by its default, which is what it decides by if it is calibrated.
    bootstrap : int
        The number of resamples for 90 % percentile intervals; 0 for none. Examples are resampled, and the same ones for
        all methods. The expected calibration error gets no interval, because resampling makes it larger.
    mask : callable or "all", optional
        Which positions of inputs count in scores, as for ``ood_score``.
    generator : torch.Generator, optional
        The same seed gives the same intervals.

    Returns
    -------
    Evaluation
        One row per method and score. ``print`` shows it as a table; ``to_pandas``, ``to_markdown``, ``to_dict`` and
        ``plot`` give it in other forms.

    Raises
    ------
    DataError
        If a set is empty, or targets are missing.
    SettingsError
        If a method does not have the score, or two rows would have the same name.
    LikelihoodError
        If the methods have different likelihoods, or targets do not fit.
    NotFittedError
        If a method was not fitted.

    Notes
    -----
    Of a calibrated method, the table also has the shares of familiar inputs (false alarms) and of strangers (flagged)
    whose p-value is at most 0.05. To choose a score by its row and then to quote that row flatters the method: choose
    on some strangers, and quote others.

    Examples
    --------
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 2, bias=False), torch.eye(4), torch.tensor([0, 1, 0, 1])
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], y[:2], progress=False)
    >>> network = nb.baselines.MAP(model).fit(x[:2], y[:2])
    >>> methods = {"projected": (posterior, "max_variance"), "network": network}
    >>> evaluation = nb.evaluate(methods, (1.5 * x[:2], y[:2]), {"unseen inputs": x[2:]})
    >>> [row.name for row in evaluation.rows], evaluation["projected"].strangers["unseen inputs"].auroc
    (['projected', 'network'], 1.0)
    >>> table = evaluation.to_markdown()  # or print(evaluation)
    """
    if type(bootstrap) is not int or bootstrap < 0:
        msg = f"bootstrap must be a number of resamples such as 1000, or 0 for none, not {bootstrap!r}."
        raise SettingsError(msg)
    if not (mask is None or callable(mask) or (isinstance(mask, str) and mask == "all")):
        msg = 'mask must be a function of the inputs or "all": batches are read one at a time.'
        raise SettingsError(msg)
    entries = read_methods(methods, scores)
    familiar, strange = read_familiar(in_data), read_strangers(strangers)
    seed = draw_seed(generator) if bootstrap else None
    rows: list[EvaluationRow] = []
    sizes: dict[str, int] = {}
    for entry in entries:
        inside = ask_familiar(entry, familiar, mask)
        outside = {name: ask_strangers(entry, name, data, mask) for name, data in strange.items()}
        rows += [_row(entry, name, inside, outside, bootstrap, seed) for name in entry.kinds]
        sizes = {name: len(answers.scores[rows[-1].name]) for name, answers in outside.items()}
    return Evaluation(entries[0].likelihood.name, len(rows[-1].scores_in), sizes, tuple(rows))


def _row(
    entry: Entry,
    name: str,
    inside: MethodAnswers,
    outside: Mapping[str, MethodAnswers],
    bootstrap: int,
    seed: int | None,
) -> EvaluationRow:
    """Return the row of a method and one of its scores."""
    kind, judged = entry.kinds[name], inside.judged
    known, unknown = inside.scores[name], {stranger: answers.scores[name] for stranger, answers in outside.items()}
    own, detection = figures(judged, known, unknown)
    ends, detection_ends = ({}, {}) if seed is None else intervals(judged, known, unknown, bootstrap, seed)
    found = {
        stranger: Detection(
            **values,
            flagged=_flagged(answers, kind),
            intervals=detection_ends.get(stranger, {}),
        )
        for (stranger, values), answers in zip(detection.items(), outside.values(), strict=True)
    }
    seconds, memory = costs(entry.method)
    n_inputs = len(known) + sum(map(len, unknown.values()))
    taken = inside.seconds[name] + sum(answers.seconds[name] for answers in outside.values())
    return EvaluationRow(
        name=name,
        method=type(entry.method).__name__,
        score=CALIBRATED if kind is None else kind,
        strangers=found,
        **own,
        false_alarms=_flagged(inside, kind),
        fit_seconds=seconds,
        seconds_per_1000=1000.0 * taken / n_inputs,
        peak_memory=memory,
        intervals=ends,
        default_precision=has_default_precision(entry.method),
        noise=noise_of(entry.likelihood),
        calibrated_by=entry.method.calibration.kind if kind is None else "",
        scores_in=known,
        scores_out=unknown,
        reliability=None if judged is None else judged.reliability,
    )


def _flagged(answers: MethodAnswers, kind: str | None) -> float | None:
    """Return the share of inputs that a calibrated method decides to be strange."""
    if kind is not None or answers.p_values is None:
        return None
    return float((answers.p_values <= _ALPHA).double().mean())
