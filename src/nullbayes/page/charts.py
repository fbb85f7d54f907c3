"""Figures as SVG: curves, histograms and reliability diagrams, whose colours are the page's.

Series differ by colour, by the dashes of their line and by their marks, so that no reader depends on colour alone.
Labels of axes and legends are HTML around the drawing: they wrap on a narrow screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from nullbayes.page.axes import Axis, linear_axis, log_axis
from nullbayes.page.document import Curves, Histograms, Reliability, Series
from nullbayes.page.markup import element, escaped, prose
from nullbayes.page.numerals import figure, is_number

WIDTH, HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 8, 26
N_COLOURS = 6
_DASHES = ("", "8 4", "2 3", "10 3 2 3", "14 4")  # their number and that of the colours have no common divisor
_MARKS = ("circle", "square", "triangle", "diamond", "cross", "wedge", "plus")
_RADIUS = 3.1  # of a mark
_FEW = 24  # points: so many of a curve are all marked

Point = tuple[float, float, float | None]  # x, y, spread


@dataclass(frozen=True)
class Frame:
    """Where the numbers of a figure lie on the drawing."""

    x: Axis
    y: Axis
    top: float = _TOP
    height: float = HEIGHT - _TOP - _BOTTOM

    def across(self, value: float) -> float:
        """Return the horizontal place of a number."""
        return _LEFT + _within(self.x.place(value)) * (WIDTH - _LEFT - _RIGHT)

    def up(self, value: float) -> float:
        """Return the vertical place of a number."""
        return self.top + (1 - _within(self.y.place(value))) * self.height


def render_curves(curves: Curves, number: int) -> str:
    """Return curves in one frame, with bands of one standard deviation, as HTML."""
    pieces = [_pieces(series, curves) for series in curves.series]
    points = [point for found in pieces for piece in found for point in piece]
    across = [point[0] for point in points]
    x = log_axis(across) if curves.log_x else linear_axis(across)
    heights = [height for point in points for height in _reach(point, curves.log_y)]
    if curves.y_range is not None:
        heights = list(curves.y_range)
    y = log_axis(heights) if curves.log_y else linear_axis(heights, rounded=curves.y_range is None)
    frame = Frame(x, y)
    drawn = "".join(_curve(i, series, pieces[i], frame) for i, series in enumerate(curves.series))
    if curves.y_range is not None or curves.log_y:  # the band of a logarithmic axis may reach down to zero
        drawn = _clipped(drawn, frame)
    legend = [_legend_item(i, series.name, _swatch(i, series)) for i, series in enumerate(curves.series) if series.name]
    if any(point[2] is not None for point in points):
        legend.append(_legend_item(None, "band: one standard deviation", _SWATCH_OF_BAND))
    drawing = _drawing(curves.alt or curves.caption, _grid(frame) + drawn, is_empty=not points)
    return _figure(drawing, curves.caption, number, curves.x_label, curves.y_label, legend)


def render_histograms(histograms: Histograms, number: int) -> str:
    """Return histograms over common bins in one frame, as HTML."""
    edges = histograms.edges
    bins = [i for i in range(len(edges) - 1) if is_number(edges[i]) and is_number(edges[i + 1])]
    found = {
        name: [(float(edges[i] or 0), float(edges[i + 1] or 0), float(shares[i] or 0)) for i in bins if i < len(shares)]
        for name, shares in ((n, [s if is_number(s) else 0.0 for s in h]) for n, h in histograms.shares.items())
    }
    bars = [bar for parts in found.values() for bar in parts]
    x = linear_axis([end for left, right, _ in bars for end in (left, right)])
    frame = Frame(x, linear_axis([0.0, *([share for *_, share in bars] or [1.0])], rounded=True))
    drawn = "".join(_histogram(i, parts, frame) for i, parts in enumerate(found.values()))
    legend = [_legend_item(i, name, _swatch_of_bars(i)) for i, name in enumerate(found)]
    limit = histograms.threshold
    if limit is not None and bars and min(bars)[0] <= limit <= max(right for _, right, _ in bars):
        drawn += f'<path class="diagonal" d="M{frame.across(limit):.1f} {frame.up(0):.1f}V{frame.top:.1f}"/>'
        swatch = '<path class="diagonal" d="M15 0V14"/>'
        legend.append(_legend_item(None, "threshold: inputs to the right of it are flagged", swatch))
    drawing = _drawing(histograms.alt or histograms.caption, _grid(frame) + drawn, is_empty=not bars)
    return _figure(drawing, histograms.caption, number, histograms.x_label, "share of inputs", legend)


def render_reliability(reliability: Reliability, number: int) -> str:
    """Return accuracy by confidence as bars against the diagonal, with the numbers of predictions above them."""
    bins = list(zip(reliability.count, reliability.confidence, reliability.accuracy, strict=False))
    unit = linear_axis([0.0, 1.0])
    frame = Frame(unit, unit, top=64, height=300)
    largest = max((float(count or 0) for count, *_ in bins if is_number(count)), default=0.0)
    drawn = ""
    for i, (count, confidence, accuracy) in enumerate(bins):
        if count is None or not is_number(count) or count <= 0:
            continue
        left, right = frame.across(i / len(bins)) + 1, frame.across((i + 1) / len(bins)) - 1
        drawn += _box(left, right, 52, 52 - 38 * float(count) / largest, "count")
        if confidence is None or accuracy is None or not (is_number(confidence) and is_number(accuracy)):
            continue
        drawn += _box(left, right, frame.up(0), frame.up(accuracy), "bar c1")
        drawn += _box(left, right, frame.up(confidence), frame.up(accuracy), "gap c2")
        drawn += f'<path class="line c2" d="M{left:.1f} {frame.up(confidence):.1f}H{right:.1f}"/>'
    drawn += f'<path class="diagonal" d="M{_LEFT} {frame.up(0):.1f}L{WIDTH - _RIGHT} {frame.up(1):.1f}"/>'
    if largest:
        drawn += f'<path class="axis" d="M{_LEFT} 52H{WIDTH - _RIGHT}"/>'
        drawn += f'<text x="{_LEFT - 7}" y="18" text-anchor="end">{figure(largest, 0)}</text>'
    legend = [
        _legend_item(0, "accuracy of the bin", '<rect class="bar c1" x="1" y="1" width="28" height="12"/>'),
        _legend_item(1, "mean confidence, and its gap to the accuracy", _SWATCH_OF_GAP),
        _legend_item(None, "perfect calibration", '<path class="diagonal" d="M1 13L29 1"/>'),
        _legend_item(None, "number of predictions (above)", '<rect class="count" x="1" y="1" width="28" height="12"/>'),
    ]
    alt = reliability.alt or reliability.caption
    drawing = _drawing(alt, _grid(frame) + drawn, is_empty=not largest, height=392)
    return _figure(drawing, reliability.caption, number, "confidence", "accuracy", legend)


# --- curves -----------------------------------------------------------------------------------------------------------


def _pieces(series: Series, curves: Curves) -> list[list[Point]]:
    """The points that can be drawn, cut where one cannot."""
    pieces: list[list[Point]] = [[]]
    spreads = series.spread if series.spread is not None else [None] * len(series.y)
    for x, y, spread in zip(series.x, series.y, spreads, strict=False):
        drawable = x is not None and y is not None and is_number(x) and is_number(y)
        if not drawable or (curves.log_x and float(x or 0) <= 0) or (curves.log_y and float(y or 0) <= 0):
            pieces.append([])
        else:
            width = abs(float(spread)) if spread is not None and is_number(spread) else None
            pieces[-1].append((float(x or 0), float(y or 0), width))
    return [piece for piece in pieces if piece]


def _reach(point: Point, log: bool) -> tuple[float, float]:
    """The lowest and the highest part of a point's band; a logarithmic axis does not follow a band far down."""
    _, y, spread = point
    low, high = y - (spread or 0.0), y + (spread or 0.0)
    return (max(low, 0.1 * y) if log else low), high


def _curve(i: int, series: Series, pieces: Sequence[Sequence[Point]], frame: Frame) -> str:
    colour = f"c{i % N_COLOURS + 1}"
    drawn = ""
    for piece in pieces:
        if any(spread is not None for *_, spread in piece):
            upper = [(x, y + (spread or 0.0)) for x, y, spread in piece]
            lower = [(x, y - (spread or 0.0)) for x, y, spread in reversed(piece)]
            drawn += f'<path class="band {colour}" d="{_path([*upper, *lower], frame)}Z"/>'
        if not series.points_only and len(piece) > 1:
            drawn += f'<path class="line {colour}"{_dashes(i)} d="{_path([(x, y) for x, y, _ in piece], frame)}"/>'
    points = [(x, y) for piece in pieces for x, y, _ in piece]
    if not series.points_only and len(points) > _FEW:
        stride = len(points) // 8
        points = points[stride * (i % 4 + 1) // 5 :: stride]  # marks of different curves at different places
    marks = dict.fromkeys(_mark(i, frame.across(x), frame.up(y)) for x, y in points)
    return drawn + (f'<path class="mark {colour}" d="{"".join(marks)}"/>' if marks else "")


def _path(points: Sequence[tuple[float, float]], frame: Frame) -> str:
    places = (f"{frame.across(x):.1f} {frame.up(y):.1f}" for x, y in points)
    return "M" + "L".join(place for place, _ in groupby(places))


def _mark(i: int, x: float, y: float) -> str:
    """The outline of a mark around a point."""
    r = _RADIUS
    kind = _MARKS[i % len(_MARKS)]
    if kind == "circle":
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
        "wedge": [(0, 1.2), (1.15, -0.9), (-1.15, -0.9)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    }
    if kind in corners:
        return "M" + "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in corners[kind]) + "Z"
    if kind == "plus":
        return f"M{x - r:.1f} {y:.1f}h{2 * r}M{x:.1f} {y - r:.1f}v{2 * r}"
    return f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}M{x + r:.1f} {y - r:.1f}l{-2 * r} {2 * r}"


def _dashes(i: int) -> str:
    return f' stroke-dasharray="{_DASHES[i % len(_DASHES)]}"' if i % len(_DASHES) else ""


def _swatch(i: int, series: Series) -> str:
    line = "" if series.points_only else f'<path class="line"{_dashes(i)} d="M0 7H30"/>'
    return f'{line}<path class="mark" d="{_mark(i, 15, 7)}"/>'


_SWATCH_OF_BAND = '<rect class="band" y="2" width="30" height="10"/>'


# --- bars -------------------------------------------------------------------------------------------------------------


def _histogram(i: int, bars: Sequence[tuple[float, float, float]], frame: Frame) -> str:
    if not bars:
        return ""
    path = f"M{frame.across(bars[0][0]):.1f} {frame.up(0):.1f}"
    for _, right, share in bars:
        path += f"V{frame.up(share):.1f}H{frame.across(right):.1f}"
    return f'<path class="bars c{i % N_COLOURS + 1}"{_dashes(i)} d="{path}V{frame.up(0):.1f}"/>'


def _swatch_of_bars(i: int) -> str:
    return f'<rect class="bars"{_dashes(i)} x="1" y="1" width="28" height="12"/>'


_SWATCH_OF_GAP = '<rect class="gap c2" x="1" y="2" width="28" height="11"/><path class="line c2" d="M1 2H29"/>'


def _box(left: float, right: float, a: float, b: float, kind: str) -> str:
    size = f'width="{max(right - left, 0.5):.1f}" height="{abs(a - b):.1f}"'
    return f'<rect class="{kind}" x="{left:.1f}" y="{min(a, b):.1f}" {size}/>'


# --- the frame --------------------------------------------------------------------------------------------------------


def _within(share: float) -> float:
    """A place not too far from the frame: browsers draw no numbers of 300 digits."""
    return min(max(share, -4.0), 5.0)


def _grid(frame: Frame) -> str:
    right, bottom = WIDTH - _RIGHT, frame.top + frame.height
    drawn = ""
    for tick, label in zip(frame.y.ticks, frame.y.labels, strict=True):
        y = frame.up(tick)
        drawn += f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
        drawn += f'<text x="{_LEFT - 7}" y="{y:.1f}" dy="0.35em" text-anchor="end">{escaped(label)}</text>'
    drawn += f'<path class="axis" d="M{_LEFT} {bottom:.1f}H{right}"/>'
    for tick, label in zip(frame.x.ticks, frame.x.labels, strict=True):
        x = frame.across(tick)
        drawn += f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4"/>'
        drawn += f'<text x="{x:.1f}" y="{bottom + 7:.1f}" dy="0.8em" text-anchor="middle">{escaped(label)}</text>'
    return drawn


def _clipped(drawn: str, frame: Frame) -> str:
    """What lies within the frame: an inner drawing with the same coordinates hides the rest."""
    width = WIDTH - _LEFT - _RIGHT
    place = f'x="{_LEFT}" y="{frame.top}" width="{width}" height="{frame.height}"'
    view = f'viewBox="{_LEFT} {frame.top} {width} {frame.height}"'
    return f'<svg {place} {view} overflow="hidden" aria-hidden="true">{drawn}</svg>'


def _drawing(alt: str, content: str, *, is_empty: bool, height: int = HEIGHT) -> str:
    if is_empty:
        middle = f'x="{(WIDTH + _LEFT) / 2}" y="{height / 2}"'
        content += f'<text {middle} text-anchor="middle">There is nothing to draw.</text>'
    label = escaped(alt or "figure")
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{content}</svg>'


def _legend_item(i: int | None, name: str, swatch: str) -> str:
    colour = "" if i is None else f" c{i % N_COLOURS + 1}"
    drawn = f'<svg class="swatch{colour}" viewBox="0 0 30 14" width="30" height="14" aria-hidden="true">{swatch}</svg>'
    return f"<li>{drawn}<span>{escaped(name)}</span></li>"


def _figure(drawing: str, caption: str, number: int, x_label: str, y_label: str, legend: Sequence[str]) -> str:
    """A drawing with labels of its axes, a legend and a caption."""
    parts = [
        f'<div class="y-label">{escaped(y_label)}</div>' if y_label else "",
        drawing,
        f'<div class="x-label">{escaped(x_label)}</div>' if x_label else "",
        element("ul", "".join(legend), class_="legend") if legend else "",
        f"<figcaption><b>Figure {number}.</b> {prose(caption)}</figcaption>",
    ]
    return element("figure", "".join(parts), id=f"figure-{number}")
