"""The result of an evaluation: one row per method and score, as a table, as data, and as a figure."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nullbayes.evaluation import plot, table
from nullbayes.evaluation.figures import Intervals

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Detection:
    """How well a score tells one set of strangers from familiar inputs.

    Attributes
    ----------
    auroc, aupr, fpr95 : float
        As in `nullbayes.metrics`, with strangers as the positives.
    flagged : float or None
        The share of strangers with a p-value of at most 0.05; None if the method is not calibrated.
    intervals : dict
        90 % bootstrap intervals of the figures, by their names.
    """

    auroc: float
    aupr: float
    fpr95: float
    flagged: float | None = None
    intervals: Intervals = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationRow:
    """One method, judged by one of its scores. What a method does not have is None.

    Attributes
    ----------
    name, method, score : str
        The name of the row, the class of the method, and the score; "calibrated" is the score that a calibrated method
        decides by.
    strangers : dict of Detection
        By the names of the sets of strangers.
    nll : float or None
        Negative log-likelihood of the familiar targets, per target.
    accuracy, ece : float or None
        Share of correct classes, and expected calibration error.
    rmse, coverage : float or None
        Of a regression: root mean square error, and the share of targets inside their 90 % interval.
    aurc : float or None
        Mean loss of the predictions that remain as the score rejects the others, as in `nullbayes.metrics.aurc`. The
        loss of an example is the share of its classes that are wrong, for a regression its squared error.
    false_alarms : float or None
        The share of familiar inputs with a p-value of at most 0.05; None if the method is not calibrated.
    fit_seconds, peak_memory : float or None, int or None
        As the fit reported them, memory in bytes.
    default_precision : bool
        Whether a baseline is at the default prior precision of 1.
    noise : tuple of float
        Of a regression: the standard deviation of targets around outputs that the method predicts with, for each output
        or for all of them.
    calibrated_by : str
        The score that was calibrated, where ``score`` is "calibrated"; else empty.
    seconds_per_1000 : float
        The time that it took to score 1,000 inputs.
    intervals : dict
        90 % bootstrap intervals of the figures of familiar data, by their names.
    scores_in, scores_out : Tensor (N,), dict of Tensor (M,)
        The scores, on the CPU in float64.
    reliability : Tensor (3, B) or None
        For each bin of confidence: the number of targets, how many were predicted correctly, and the sum of the
        confidences. For each level of the intervals of a regression: the number of targets, how many lie in their
        interval, and how many should.
    """

    name: str
    method: str
    score: str
    strangers: dict[str, Detection]
    nll: float | None = None
    accuracy: float | None = None
    ece: float | None = None
    rmse: float | None = None
    coverage: float | None = None
    aurc: float | None = None
    false_alarms: float | None = None
    fit_seconds: float | None = None
    seconds_per_1000: float | None = None
    peak_memory: int | None = None
    intervals: Intervals = field(default_factory=dict)
    default_precision: bool = field(default=False, kw_only=True)
    noise: tuple[float, ...] = field(default=(), kw_only=True)
    calibrated_by: str = field(default="", kw_only=True)
    scores_in: Tensor = field(kw_only=True, repr=False, compare=False)
    scores_out: dict[str, Tensor] = field(kw_only=True, repr=False, compare=False)
    reliability: Tensor | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The name that the method was given: that of the row, without the score where it has one row per score."""
        return self.name.removesuffix(f": {self.score}")


_TENSORS = ("scores_in", "scores_out", "reliability")


@dataclass(frozen=True)
class Evaluation:
    """Methods side by side on the same data, as returned by `evaluate`; prints as a table.

    ``evaluation["name"]`` is the row of that name.

    Attributes
    ----------
    likelihood : str
        Name of the likelihood of all methods.
    n_familiar, n_strangers : int, dict of int
        The numbers of inputs.
    rows : tuple of EvaluationRow
        One row per method and score, in the order in which they were given.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x, y = torch.tensor([[3.0, 0.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    >>> evaluation = nb.evaluate([nb.baselines.MAP(model).fit(x + 1, y)], (x, y), {"near": torch.zeros(2, 2)})
    >>> evaluation["MAP"].strangers["near"].auroc, round(evaluation["MAP"].accuracy, 4)
    (1.0, 0.6667)
    >>> evaluation.to_dict()["rows"][0]["score"]
    'max_probability'
    """

    likelihood: str
    n_familiar: int
    n_strangers: dict[str, int]
    rows: tuple[EvaluationRow, ...]

    def __getitem__(self, name: str) -> EvaluationRow:
        """Return the row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        msg = f"There is no row {name!r}: there are {', '.join(repr(row.name) for row in self.rows)}."
        raise KeyError(msg)

    def __str__(self) -> str:
        """Lay the figures out as a table of at most 120 columns; ``*`` marks the best of each column."""
        return table.as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the scores as plain numbers and strings, for JSON."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rows"}
        return found | {"rows": [_plain(row) for row in self.rows]}

    def to_markdown(self) -> str:
        """Return one table in Markdown, with the best of each column in bold."""
        return table.as_markdown(self)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per method and score, and columns (set, figure).

        The ends of intervals have columns of their own, such as (set, "AUROC low") and (set, "AUROC high").
        """
        return table.as_pandas(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw ROC curves and score histograms for each set of strangers, and a reliability diagram.

        Parameters
        ----------
        path : path, optional
            Where to save the figure.

        Returns
        -------
        matplotlib.figure.Figure
            The figure, which needs no display. Histograms are those of the row with the best AUROC.
        """
        figure = plot.draw(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _plain(row: EvaluationRow) -> dict[str, Any]:
    found = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in _TENSORS}
    found["strangers"] = {
        name: dataclasses.asdict(detection) | {"intervals": _lists(detection.intervals)}
        for name, detection in row.strangers.items()
    }
    return found | {"intervals": _lists(row.intervals), "noise": list(row.noise)}


def _lists(intervals: Intervals) -> dict[str, list[float]]:
    return {name: list(ends) for name, ends in intervals.items()}
