"""Figures show the numbers that they were given: read back from the drawing with the help of its tick labels."""

from __future__ import annotations

import io
import itertools
import math
import re
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from nullbayes.page import Curves, Histograms, Page, Reliability, Section, Series, render
from nullbayes.page.axes import linear_axis, log_axis, nice_ticks
from nullbayes.page.pictures import png
from support.html_tree import Node, parsed

SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻−", "0123456789--", "\N{NARROW NO-BREAK SPACE}")


def drawing(block: object) -> Node:
    tree = parsed(render(Page("Title", "Lead.", [Section("Section", [], [block])])))  # type: ignore[list-item]
    [chart] = tree.all("svg", "chart")
    return chart


def read(label: str) -> float:
    """The number that a label writes."""
    label = re.sub(r"(^|×)10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)", lambda m: f"{'e' if m[1] else '1e'}{m[2]}", label)
    return float(label.translate(SUPERSCRIPT))


def scales(chart: Node, *, log_x: bool = False, log_y: bool = False) -> tuple[object, object]:
    """Functions from places on the drawing to numbers, fitted to the first and the last tick of each axis."""
    texts = [(node.attributes, read(node.text)) for node in chart.all("text")]
    x = [(float(a["x"]), value) for a, value in texts if a["text-anchor"] == "middle"]
    y = [(float(a["y"]), value) for a, value in texts if a["text-anchor"] == "end"]
    return _fitted(x, log_x), _fitted(y, log_y)


def _fitted(ticks: list[tuple[float, float]], log: bool) -> object:
    forth, back = (math.log, math.exp) if log else (float, float)
    (p, a), (q, b) = ticks[0], ticks[-1]
    slope = (forth(b) - forth(a)) / (q - p)
    return lambda place: back(forth(a) + slope * (place - p))


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


@pytest.mark.parametrize(("log_x", "log_y"), list(itertools.product([False, True], repeat=2)))
def test_curve_goes_through_its_points(log_x: bool, log_y: bool) -> None:
    x, y = [0.5, 2.0, 30.0, 100.0], [0.02, 0.5, 0.1, 7.0]
    chart = drawing(Curves("", "", "", [Series("a", x, y)], "alt", log_x=log_x, log_y=log_y))
    to_x, to_y = scales(chart, log_x=log_x, log_y=log_y)
    [line] = chart.all("path", "line")
    found = [(to_x(a), to_y(b)) for a, b in points(line.attributes["d"])]  # type: ignore[operator]
    close = [
        pytest.approx(pair, rel=0.01) if log_x and log_y else pytest.approx(pair, rel=0.01, abs=0.1)
        for pair in zip(x, y, strict=True)
    ]
    assert found == close
    assert len(chart.all("path", "mark")) == 1


def test_band_reaches_one_standard_deviation_up_and_down() -> None:
    chart = drawing(Curves("", "", "", [Series("a", [0, 1, 2], [1, 2, 3], [0.5, 1, 0.25])], "alt"))
    to_x, to_y = scales(chart)
    [band] = chart.all("path", "band")
    found = [(to_x(a), to_y(b)) for a, b in points(band.attributes["d"])]  # type: ignore[operator]
    expected = [(0, 1.5), (1, 3), (2, 3.25), (2, 2.75), (1, 1), (0, 0.5)]
    assert found == [pytest.approx(pair, abs=0.02) for pair in expected]


def test_curve_is_broken_where_there_is_no_number() -> None:
    y = [1.0, 2.0, None, 4.0, 5.0, math.nan, 6.0, math.inf, 7.0, 8.0]
    chart = drawing(Curves("", "", "", [Series("a", list(range(10)), y)], "alt"))
    assert [len(points(node.attributes["d"])) for node in chart.all("path", "line")] == [2, 2, 2]
    assert chart.all("path", "mark")[0].attributes["d"].count("M") == 7  # a single point has a mark, too


def test_curve_that_comes_back_keeps_its_way() -> None:
    chart = drawing(Curves("", "", "", [Series("a", [0, 1, 0, 1, 1], [0, 1, 0, 1, 1])], "alt"))
    assert len(points(chart.all("path", "line")[0].attributes["d"])) == 4  # the last point stands still


def test_what_is_outside_the_range_is_cut_off() -> None:
    series = [Series("a", [0, 1, 2], [0, 50, 1])]
    chart = drawing(Curves("", "", "", series, "alt", y_range=(-1.0, 1.0)))
    assert [read(node.text) for node in chart.all("text") if node.attributes["text-anchor"] == "end"][::4] == [
        -1.0,
        1.0,
    ]
    [inner] = [node for node in chart.all("svg") if node is not chart]
    assert inner.attributes["overflow"] == "hidden"
    assert inner.all("path", "line")


def test_thirty_curves_differ_in_more_than_colour() -> None:
    series = [Series(f"s{i}", [0, 1], [i, i]) for i in range(30)]
    chart = drawing(Curves("", "", "", series, "alt"))
    lines = chart.all("path", "line")
    looks = [(*sorted(node.classes), node.attributes.get("stroke-dasharray")) for node in lines]
    assert len(set(looks)) == 30
    assert len({look[-1] for look in looks[:5]}) == 5  # the first ones also without colour


def test_histogram_is_as_high_as_its_shares() -> None:
    shares = {"in": [0.5, 0.25, 0.25], "out": [0.0, 0.1, math.nan]}
    chart = drawing(Histograms("", "", [0.0, 1.0, 2.0, 4.0], shares, "alt"))
    to_x, to_y = scales(chart)
    for path, expected in zip(chart.all("path", "bars"), ([0.5, 0.25, 0.25], [0.0, 0.1, 0.0]), strict=True):
        heights = [to_y(float(v)) for v in re.findall(r"V(-?[\d.]+)", path.attributes["d"])]  # type: ignore[operator]
        ends = [to_x(float(h)) for h in re.findall(r"H(-?[\d.]+)", path.attributes["d"])]  # type: ignore[operator]
        assert heights == pytest.approx([*expected, 0.0], abs=0.002)
        assert ends == pytest.approx([1.0, 2.0, 4.0], abs=0.02)


def test_a_threshold_is_a_line_across_the_histograms() -> None:
    shares = {"in": [0.5, 0.25, 0.25]}
    without, chart = (drawing(Histograms("", "", [0.0, 1.0, 2.0, 4.0], shares, "alt", *more)) for more in ((), (2.5,)))
    assert not without.all("path", "diagonal")
    to_x, _ = scales(chart)
    (line,) = chart.all("path", "diagonal")
    found = re.fullmatch(r"M([\d.]+) [\d.]+V[\d.]+", line.attributes["d"])
    assert found is not None
    assert to_x(float(found[1])) == pytest.approx(2.5, abs=0.02)  # type: ignore[operator]
    text = render(Page("", "", [Section("", [], [Histograms("", "", [0.0, 1.0], {"in": [1.0]}, "alt", 0.5)])], {}))
    assert "inputs to the right of it are flagged" in text


def test_a_threshold_beyond_the_bins_is_no_line() -> None:
    assert not drawing(Histograms("", "", [0.0, 1.0], {"in": [1.0]}, "alt", 7.0)).all("path", "diagonal")


def test_reliability_has_accuracy_confidence_and_counts() -> None:
    chart = drawing(Reliability("", [0, 10, 40, 20], [0.1, 0.4, 0.6, 0.9], [0.2, 0.3, 0.7, 0.8], "alt"))
    bars, gaps, counts = (chart.all("rect", kind) for kind in ("bar", "gap", "count"))
    unit = 300.0  # the height of the frame: from the tick at 0 to the tick at 1
    ticks = {
        node.text: float(node.attributes["y"]) for node in chart.all("text") if node.attributes.get("dy") == "0.35em"
    }
    assert ticks["0.0"] - ticks["1.0"] == pytest.approx(unit)

    def heights(nodes: list[Node]) -> list[float]:
        return [float(node.attributes["height"]) for node in nodes]

    assert [h / unit for h in heights(bars)] == pytest.approx([0.3, 0.7, 0.8], abs=0.001)
    assert [h / unit for h in heights(gaps)] == pytest.approx([0.1, 0.1, 0.1], abs=0.001)
    assert [h / max(heights(counts)) for h in heights(counts)] == pytest.approx([0.25, 1.0, 0.5], abs=0.01)
    assert "40" in [node.text for node in chart.all("text")]


numbers = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: float(f"{value:.6g}"))


@settings(deadline=None, max_examples=200)
@given(numbers, numbers, st.integers(3, 10))
def test_ticks_are_all_round_numbers_within_the_interval(a: float, b: float, count: int) -> None:
    low, high = sorted((a, b))
    if high - low <= 1e-6 * max(abs(low), abs(high), 1e-6):
        high = low + max(abs(low), 1.0)
    ticks, step = nice_ticks(low, high, count)
    exact = Decimal(repr(step))
    assert exact.normalize().as_tuple().digits in {(1,), (2,), (5,)}
    assert all(Decimal(repr(tick)) % exact == 0 for tick in ticks)
    assert all(after - before == exact for before, after in itertools.pairwise(Decimal(repr(tick)) for tick in ticks))
    slack = 1e-8 * (high - low)
    assert low - slack <= ticks[0] < low + step + slack
    assert high - step - slack < ticks[-1] <= high + slack
    assert count / 2.5 - 1 <= len(ticks) <= count + 1


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4), st.booleans())
@example([2.0191373825210396e16, 2.7734635307894356e16], False)  # four steps and a little: fives hold one multiple
def test_labels_say_where_the_ticks_are(values: list[float], rounded: bool) -> None:
    for axis in (linear_axis(values, rounded=rounded), log_axis(values)):
        assert axis.low < axis.high
        assert len(set(axis.labels)) == len(axis.labels) >= 2
        assert [read(label) for label in axis.labels] == pytest.approx(list(axis.ticks), rel=1e-9)
        assert all(-1e-6 <= axis.place(tick) <= 1 + 1e-6 for tick in axis.ticks)
        assert list(axis.ticks) == sorted(axis.ticks)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.0, 180.0], ["0", "50", "100", "150"]),
        ([-0.013, 0.021], ["−0.01", "0.00", "0.01", "0.02"]),
        ([0, 2e6], ["0", "5.0×10⁵", "1.0×10⁶", "1.5×10⁶", "2.0×10⁶"]),
        ([0, 40000], ["0", "10\N{NARROW NO-BREAK SPACE}000", "20\N{NARROW NO-BREAK SPACE}000",
                      "30\N{NARROW NO-BREAK SPACE}000", "40\N{NARROW NO-BREAK SPACE}000"]),
    ],
)  # fmt: skip
def test_labels_of_usual_axes(values: list[float], labels: list[str]) -> None:
    assert list(linear_axis(values).labels) == labels


def test_labels_of_logarithmic_axes() -> None:
    assert list(log_axis([1e-8, 1.0]).labels) == ["10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²", "10⁰"]
    assert list(log_axis([0.1, 100.0]).labels) == ["0.1", "1", "10", "100"]
    assert list(log_axis([1.0, 12.0]).labels) == ["1", "2", "5", "10"]


@pytest.mark.parametrize("image", [[[0, 128], [255, 7], [1, 2]], [[[1, 2, 3], [4, 5, 6]], [[255, 0, 9], [8, 7, 6]]]])
def test_picture_is_read_as_it_was_written(image: list[list[int]]) -> None:
    with Image.open(io.BytesIO(png(image))) as read_back:
        pixels = [read_back.getpixel((j, i)) for i in range(len(image)) for j in range(len(image[0]))]
        assert read_back.size == (len(image[0]), len(image))
    assert [list(p) if isinstance(p, tuple) else p for p in pixels] == [pixel for row in image for pixel in row]


@pytest.mark.parametrize("image", [[[0, 256]], [[-1]], [[0, 1], [2]], [[]], [[[1, 2]]], [["a"]]])
def test_picture_of_anything_else_is_refused(image: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="picture"):
        png(image)
