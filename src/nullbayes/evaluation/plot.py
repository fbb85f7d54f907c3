"""The figure of an evaluation: ROC curves, histograms of scores, and a reliability diagram."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nullbayes.errors import SettingsError, optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nullbayes.evaluation.results import Evaluation, EvaluationRow

_COLORS = ("#2563a8", "#d9782d", "#2f8f6b", "#b4447a", "#7a5ab5", "#8a6d1f", "#3fa7c4", "#6b6b6b")
_STYLES = ("-", "--", ":", "-.")
_MOST = 8  # curves in a panel
_POINTS = 1000  # of a curve
_BINS = 40
_SPREAD = 100.0  # between small and large scores, from which a histogram takes their logarithm
_GREY = "#999999"


def draw(evaluation: Evaluation) -> Figure:
    """Draw two panels for each set of strangers, and a third one in the first row if there are predictions."""
    with optional("plot()"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    predicted = [row for row in evaluation.rows if row.reliability is not None]
    names = list(evaluation.n_strangers)
    height, width = max(1, len(names)), 2 * bool(names) + bool(predicted)
    if not width:
        msg = 'There is nothing to draw: no method predicts, and there are no strangers. Pass some, {"noise": x}.'
        raise SettingsError(msg)
    figure = Figure(figsize=(4.8 * width, 4.2 * height), layout="constrained")
    FigureCanvasAgg(figure)
    styles = {
        row.name: {"color": _COLORS[i % len(_COLORS)], "ls": _STYLES[i // len(_COLORS) % len(_STYLES)]}
        for i, row in enumerate(evaluation.rows)
    }
    grid = figure.add_gridspec(height, width)
    for i, name in enumerate(names):
        shown = sorted(evaluation.rows, key=lambda row: -row.strangers[name].auroc)[:_MOST]
        _roc(figure.add_subplot(grid[i, 0]), name, shown, len(evaluation.rows), styles)
        _histogram(figure.add_subplot(grid[i, 1]), name, shown[0])
    if predicted:
        _reliability(figure.add_subplot(grid[0, -1]), predicted, styles)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(11)
    return figure


def _roc(axis: Any, name: str, rows: list[EvaluationRow], n_rows: int, styles: dict[str, dict[str, str]]) -> None:
    axis.plot([0, 1], [0, 1], color=_GREY, lw=1, ls=":")
    for row in rows:
        false, true = _curve(row.scores_in, row.scores_out[name])
        axis.plot(false, true, lw=1.8, label=f"{row.name} ({row.strangers[name].auroc:.3f})", **styles[row.name])
    best = f", the best {len(rows)} of {n_rows}" if len(rows) < n_rows else ""
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axis.set(title=f"{name}: ROC (AUROC){best}", xlabel="familiar inputs flagged", ylabel="strangers flagged")
    axis.legend(frameon=False, loc="lower right", fontsize=8)


def _curve(inside: Tensor, outside: Tensor) -> tuple[Any, Any]:
    """Return the shares of familiar inputs and of strangers whose score reaches each threshold."""
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    shares = [
        1.0 - torch.searchsorted(values.sort().values, thresholds).double() / len(values)
        for values in (inside, outside)
    ]
    start = torch.zeros(1, dtype=torch.float64, device="cpu")
    false, true = (torch.cat([start, share]) for share in shares)
    if len(false) > _POINTS:
        kept = torch.linspace(0, len(false) - 1, _POINTS, device="cpu").round().long()
        false, true = false[kept], true[kept]
    return false.numpy(), true.numpy()


def _histogram(axis: Any, name: str, row: EvaluationRow) -> None:
    inside, outside, label = row.scores_in, row.scores_out[name], row.score.replace("_", " ")
    both = torch.cat([inside, outside])
    low, high = _quantile(both, 0.01), _quantile(both, 0.99)
    if float(both.min()) > 0 and high > _SPREAD * low:
        inside, outside, both, label = inside.log10(), outside.log10(), both.log10(), f"log₁₀ of {label}"
        low, high = _quantile(both, 0.001), _quantile(both, 0.999)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    bins = torch.linspace(low, high, _BINS + 1, dtype=torch.float64, device="cpu")
    for values, color, what in ((inside, _COLORS[0], "familiar"), (outside, _COLORS[1], name)):
        shown = values.clamp(low, high).numpy()  # what lies outside is counted at the ends
        weights = torch.full_like(values, 1.0 / len(values)).numpy()
        axis.hist(shown, bins.numpy(), weights=weights, color=color, alpha=0.65, label=what)
    axis.set(title=f"{name}: scores of {row.name}", xlabel=label, ylabel="share of inputs")
    axis.legend(frameon=False, fontsize=8)


def _quantile(values: Tensor, share: float) -> float:
    ordered = values.sort().values  # torch.quantile takes no more than 16 million
    return float(ordered[round(share * (len(ordered) - 1))])


def _reliability(axis: Any, rows: list[EvaluationRow], styles: dict[str, dict[str, str]]) -> None:
    """Draw one curve for each prediction, which rows share that differ in their score alone."""
    axis.plot([0, 1], [0, 1], color=_GREY, lw=1, ls=":")
    shared: list[tuple[Tensor, list[EvaluationRow]]] = []
    for row in rows:
        table = row.reliability
        assert table is not None
        others = next((alike for other, alike in shared if torch.equal(table, other)), None)
        if others is not None:
            others.append(row)
        else:
            shared.append((table, [row]))
    for table, alike in shared[:_MOST]:
        row, names = alike[0], list(dict.fromkeys(row.label for row in alike))
        counts, met, promised = (values[table[0] > 0] for values in table)
        x, y, style = (promised / counts).numpy(), (met / counts).numpy(), styles[row.name]
        axis.plot(x, y, lw=1.2, label=", ".join(names[:3]) + ", ..." * (len(names) > 3), **style)
        axis.scatter(x, y, s=(8.0 + 120.0 * counts / counts.sum()).numpy(), color=style["color"], clip_on=False)
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    if rows[0].rmse is None:
        axis.set(
            title="Reliability on familiar data",
            xlabel="confidence (area of a dot: share of targets)",
            ylabel="accuracy",
        )
    else:
        axis.set(title="Intervals on familiar data", xlabel="level of the interval", ylabel="share of targets inside")
    axis.legend(frameon=False, loc="lower right", fontsize=8)
