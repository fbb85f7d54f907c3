"""The figure of a report: the time of each phase, and the residual of each sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nullbayes.errors import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nullbayes.posteriors.report import FitReport

_COLOR, _LIMIT = "#2563a8", "#d9782d"


def draw(report: FitReport) -> Figure:
    """Draw seconds by phase on the left, and residuals by sample with the tolerance on the right."""
    with optional("plot()"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, residuals = figure.subplots(1, 2)
    names = list(report.seconds)
    times.barh(names, [report.seconds[name] for name in names], color=_COLOR)
    times.invert_yaxis()
    times.set(title=f"{sum(report.seconds.values()):.1f} s in all", xlabel="seconds")
    residuals.plot(range(len(report.residual)), report.residual, "o", color=_COLOR, ms=4)
    residuals.axhline(report.tolerance, color=_LIMIT, lw=1.2, label=f"tolerance {report.tolerance:g}")
    residuals.set(title=f"{report.projector}: residuals", xlabel="sample", ylabel="share of the noise left on the rows")
    residuals.set_ylim(bottom=0.0)
    residuals.legend(frameon=False, fontsize=8)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure
