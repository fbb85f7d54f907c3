"""From an evaluation to sections of a page: tables of all figures, reliability, histograms of scores, galleries."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nullbayes.page.document import Block, Column, Gallery, Histograms, Reliability, Section, Table, Value

if TYPE_CHECKING:
    from nullbayes import Evaluation

Summary = Mapping[str, Any]  # of an evaluation, as JSON holds it
Paper = Mapping[str, Mapping[str, float]]  # by the name of the row, then "familiar: accuracy" or "SVHN: AUROC"

_BINS = 40
_SPREAD = 100.0  # between small and large scores, from which a histogram takes their logarithm


@dataclass(frozen=True)
class _Figure:
    """A figure of merit: its name in an evaluation, its column, and a factor between both."""

    name: str
    column: Column
    factor: float = 1.0


_ON_AURC = (
    "Mean loss of the predictions that are kept, while the score rejects the strangest inputs one after another. It is "
    "about wrong predictions, not about strangers."
)
_FAMILIAR = (
    _Figure("accuracy", Column("accuracy", "Share of correct classes.", "high")),
    _Figure("rmse", Column("RMSE", "Root mean square error of the mean prediction.", "low")),
    _Figure("nll", Column("NLL", "Negative log-likelihood per target, in nats.", "low", 4)),
    _Figure("ece", Column("ECE", "Expected calibration error: the gap between confidence and accuracy.", "low")),
    _Figure("coverage", Column("in 90 %", "Share of targets inside their 90 % interval; it should be 0.9.")),
    _Figure("aurc", Column("AURC", _ON_AURC, "low", 4)),
    _Figure("false_alarms", Column("false alarms", "Share of familiar inputs with a p-value of at most 0.05.")),
)
_BY_SCORE = ("aurc", "false_alarms")  # of familiar data; the others are of predictions, whatever the score is
_STRANGE = (
    _Figure("auroc", Column("AUROC", "Probability that a stranger scores higher than a familiar input.", "high")),
    _Figure("aupr", Column("AUPR", "Average precision, with strangers as the positives.", "high")),
    _Figure("fpr95", Column("FPR95", "Share of familiar inputs flagged where 95 % of strangers are.", "low")),
    _Figure("flagged", Column("flagged", "Share of strangers with a p-value of at most 0.05.")),
)
_COSTS = (
    _Figure("fit_seconds", Column("fit s", "Seconds of the fit.", "low", 1)),
    _Figure("seconds_per_1000", Column("s per 1,000", "Seconds to score 1,000 inputs.", "low", 2)),
    _Figure("peak_memory", Column("MiB", "Memory of the fit at its peak.", "low", 0), 2.0**-20),
)


def evaluation_summary(
    evaluation: Evaluation, *, shown: Sequence[str] | None = None, thresholds: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return an evaluation as plain numbers and strings for JSON, with histograms of scores and reliability.

    Parameters
    ----------
    evaluation : Evaluation
        As `nullbayes.evaluate` returns it.
    shown : sequence of str, optional
        The rows whose histogram and reliability are kept; by default the first one.
    thresholds : mapping of str to float, optional
        By the name of a row, the score above which inputs are flagged, for its histogram.

    Returns
    -------
    dict
        ``evaluation.to_dict()`` with "histograms" and "reliability", each by the name of the row.
    """
    rows = [evaluation[name] for name in shown] if shown is not None else list(evaluation.rows[:1])
    return evaluation.to_dict() | {
        "histograms": {row.name: _histogram(row, (thresholds or {}).get(row.name)) for row in rows},
        "reliability": {row.name: row.reliability.tolist() for row in rows if row.reliability is not None},
    }


def evaluation_sections(
    evaluation: Evaluation | Summary | Sequence[Evaluation | Summary],
    *,
    paper: Paper | None = None,
    galleries: Sequence[Gallery] = (),
    per_method: bool = False,
    skipped: Collection[str] = (),
) -> list[Section]:
    """Return the sections of a page that show an evaluation: every figure, reliability, scores, and inputs.

    Parameters
    ----------
    evaluation : Evaluation, what `evaluation_summary` returns, or a sequence of them
        A sequence holds one per seed: figures are their mean and standard deviation, and pictures are of the first.
    paper : mapping, optional
        Figures of the paper, by the name of the row and "familiar: accuracy", or "SVHN: AUROC".
    galleries : sequence of Gallery
        Of inputs; see `nullbayes.page.inputs`.
    per_method : bool
        Show figures that do not depend on the score once per method, where methods have one row per score.
    skipped : collection of str
        Figures of familiar data that the page shows elsewhere, such as "accuracy".

    Returns
    -------
    list of Section
        "Predictions", "Detection", "Calibration", "Scores" and "Inputs"; those with nothing to show are left out.
    """
    several = isinstance(evaluation, Sequence)
    given = evaluation if isinstance(evaluation, Sequence) else [evaluation]
    runs = [one if isinstance(one, Mapping) else evaluation_summary(one) for one in given]
    if not runs:
        msg = "There is no evaluation to show: pass at least one."
        raise ValueError(msg)
    seeds = f" Figures are the mean over {len(runs)} seeds ± their standard deviation." if several and runs[1:] else ""
    figures = [figure for figure in _FAMILIAR if figure.name not in skipped]
    caption = f"Familiar data, {runs[0]['n_familiar']:,} inputs"
    familiar = [_table(runs, caption, "familiar", figures, paper)]
    methods = _methods(runs[0]) if per_method else None
    if methods is not None:
        by_score = [figure for figure in figures if figure.name in _BY_SCORE]
        figures = [figure for figure in figures if figure.name not in _BY_SCORE]
        familiar = [
            _table(runs, caption, "familiar", figures, paper, methods),
            _table(runs, f"{caption}, by the score", "familiar", by_score, paper),
        ]
    strange = [
        _table(runs, f"{name}, {n:,} inputs", name, _STRANGE, paper) for name, n in runs[0]["n_strangers"].items()
    ]
    caption = "Cost" if methods is None else "Cost, with the score of the first row above"
    cost = _table(runs, caption, "cost", _COSTS, paper, methods)
    sections = [
        Section("Predictions", [f"What each method predicts for data that it was not fitted to.{seeds}"], familiar),
        Section("Detection", [f"How well each score tells strangers from familiar inputs.{seeds}"], [*strange, cost]),
        Section("Calibration", [_ON_CALIBRATION], list(_reliabilities(runs[0]))),
        Section("Scores", [_ON_SCORES], list(_histograms(runs[0]))),
        Section("Inputs", [_ON_INPUTS], list(galleries)),
    ]
    return [section for section in sections if any(map(_shows, section.blocks))]


_ON_CALIBRATION = "Of the predictions with a confidence of 0.8, four in five should be right: dots on the diagonal."
_ON_SCORES = "A higher score is a stranger input. The less the histograms overlap, the better a threshold works."
_ON_INPUTS = "A p-value is the share of familiar inputs that are at least as strange."


def _shows(block: Block) -> bool:
    return (
        bool(block.rows) if isinstance(block, Table) else bool(block.pictures) if isinstance(block, Gallery) else True
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def _methods(run: Summary) -> dict[int, str] | None:
    """Return the first row of each method with the name of the method; None where every row is a method."""
    labels = [row["name"].removesuffix(f": {row['score']}") for row in run["rows"]]
    return {labels.index(label): label for label in labels} if len(set(labels)) < len(labels) else None


def _table(
    runs: Sequence[Summary],
    caption: str,
    group: str,
    figures: Sequence[_Figure],
    paper: Paper | None,
    methods: Mapping[int, str] | None = None,
) -> Table:
    """Return a table of the figures that some row has; one without rows if there are none.

    ``methods`` are the rows to show, with their names; by default all.
    """
    found = {figure: [_values(runs, i, group, figure) for i in range(len(runs[0]["rows"]))] for figure in figures}
    kept = {figure: values for figure, values in found.items() if any(values)}
    names = [row["name"] for row in runs[0]["rows"]]
    shown = dict(enumerate(names)) if methods is None else methods
    meaning = "The method." if methods is not None else "The method, and the score that it is judged by."
    if methods is None and any(row["score"] == "calibrated" for row in runs[0]["rows"]):
        meaning = f'{meaning[:-1]}; "calibrated" is the score that it decides by, after calibrate.'
    columns, cells = [Column("method", meaning)], list[list[Any]]()
    for figure, values in kept.items():
        ends = [_ends(runs, i, group, figure) for i in range(len(values))]
        columns.append(figure.column)
        key = f"{group}: {figure.column.name}"
        cells.append([_value(v, name, key, paper) for v, name in zip(values, names, strict=True)])
        for j, end in enumerate(("low", "high") if any(ends) else ()):
            columns.append(Column(f"{figure.column.name} {end}", "End of a 90 % bootstrap interval.", None))
            cells.append([None if pair is None else Value(pair[j]) for pair in ends])
    return Table(caption, columns, [[name, *(cell[i] for cell in cells)] for i, name in shown.items()] if kept else [])


def _place(run: Summary, i: int, group: str) -> Mapping[str, Any]:
    row: Mapping[str, Any] = run["rows"][i]
    return row if group in ("familiar", "cost") else row["strangers"][group]


def _values(runs: Sequence[Summary], i: int, group: str, figure: _Figure) -> list[float]:
    found = (_place(run, i, group)[figure.name] for run in runs)
    return [figure.factor * value for value in found if value is not None]


def _ends(runs: Sequence[Summary], i: int, group: str, figure: _Figure) -> Sequence[float] | None:
    """Return the ends of a bootstrap interval, which one run has and several have not."""
    found: Sequence[float] | None = _place(runs[0], i, group)["intervals"].get(figure.name) if len(runs) == 1 else None
    return found


def _value(values: Sequence[float], name: str, key: str, paper: Paper | None) -> Value | None:
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Value(statistics.fmean(values), spread, (paper or {}).get(name, {}).get(key))


# --- figures ----------------------------------------------------------------------------------------------------------


def _reliabilities(run: Summary) -> Iterator[Reliability]:
    seen: list[Any] = []
    for name, table in run["reliability"].items():
        if table in seen:  # rows that differ in their score alone
            continue
        seen.append(table)
        count, met, promised = ([float(value) for value in values] for values in table)
        right, said = _shares(met, count), _shares(promised, count)
        gap = sum(abs(a - b) for a, b in zip(met, promised, strict=True)) / max(1.0, sum(count))
        if any(row["rmse"] is not None for row in run["rows"]):
            caption, what = f"Intervals of {name}", "Share of targets inside their interval, by its level"
        else:
            caption, what = f"Reliability of {name}", "Accuracy by confidence"
        alt = f"{what}, in {len(count)} bins; the mean gap to the diagonal is {gap:.3f}."
        yield Reliability(caption, count, said, right, alt)


def _shares(part: Sequence[float], count: Sequence[float]) -> list[float]:
    """Return shares of counts; NaN where there is nothing to have a share of."""
    return [a / n if n else math.nan for a, n in zip(part, count, strict=True)]


def _histograms(run: Summary) -> Iterator[Histograms]:
    aurocs = {row["name"]: {name: found["auroc"] for name, found in row["strangers"].items()} for row in run["rows"]}
    for name, found in run["histograms"].items():
        told = ", ".join(f"{stranger} {auroc:.3f}" for stranger, auroc in aurocs[name].items())
        alt = f"Scores of familiar inputs and of strangers; AUROC: {told}."
        limit = found.get("threshold")  # which stored results may lack
        yield Histograms(f"Scores of {name}", found["label"], found["edges"], found["shares"], alt, limit)


def _histogram(row: Any, threshold: float | None) -> dict[str, Any]:
    """Return shares of inputs over common bins; what lies beyond the first or the last is counted in it."""
    score = f"{row.calibrated_by}, calibrated" if row.calibrated_by else row.score
    label, sets = f"score: {score.replace('_', ' ')}", {"familiar": row.scores_in, **row.scores_out}
    both = torch.cat(list(sets.values()))
    low, high = _quantile(both, 0.01), _quantile(both, 0.99)
    if float(both.min()) > 0 and high > _SPREAD * low:
        label, sets, both = f"log₁₀ of {label}", {name: values.log10() for name, values in sets.items()}, both.log10()
        low, high = _quantile(both, 0.001), _quantile(both, 0.999)
        threshold = math.log10(threshold) if threshold is not None and threshold > 0 else None
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64, device="cpu")
    counts = {name: torch.histc(values.double().clamp(low, high), _BINS, low, high) for name, values in sets.items()}
    shares = {name: (count / len(sets[name])).tolist() for name, count in counts.items()}
    found: dict[str, Any] = {"label": label, "edges": edges.tolist(), "shares": shares}
    return found if threshold is None else {**found, "threshold": threshold}


def _quantile(values: Tensor, share: float) -> float:
    ordered = values.sort().values
    return float(ordered[round(share * (len(ordered) - 1))])
