"""A page opened in a real browser: it draws, sorts, prints, and is read on a phone, in the dark and without a mouse."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nullbayes.page import Column, Page, Section, Table, Value, render
from support.html_tree import colour, contrast
from support.sample_page import HOSTILE, accidents, sample

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(BROWSER is None, reason="no browser: install Debian's package chromium"),
]

Opened = Callable[..., Any]


def unsorted() -> Page:
    """A table of names and figures in no order."""
    names = ["ten 10", "ten 9", "Alpha", "beta", "émile", "zeta", "<b>", "omega"]
    figures = [0.5, None, 0.25, math.inf, -1.0, math.nan, 10.0, 2e-9]
    values = [None if figure is None else Value(figure) for figure in figures]
    rows = [[name, value, value or "x"] for name, value in zip(names, values, strict=True)]
    columns = [Column("name"), Column("high", best="high"), Column("low", best="low")]
    return Page("Sorting", "Lead.", [Section("Section", [], [Table("Caption", columns, rows)])])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    pages = {"sample": sample(), "accidents": accidents(), "unsorted": unsorted()}
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(render(page), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Opened]:
    """Opens a page; at the end, nothing else was loaded and the console is empty."""
    contexts, complaints, requests, own = [], list[str](), list[str](), set[str]()

    def open_page(name: str, *, width: int = 1200, scheme: str = "light", script: bool = True) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=script
        )
        contexts.append(context)
        page = context.new_page()
        address = files[name].as_uri()
        own.add(address)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append("dialog"))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
    assert {url for url in requests if not url.startswith("data:")} == own


def column(page: Any, i: int) -> list[str]:
    return page.eval_on_selector_all("tbody tr", f"rows => rows.map(row => row.cells[{i}].innerText.trim())")


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    return page.eval_on_selector_all(
        selector,
        "nodes => nodes.map(node => { const b = node.getBoundingClientRect();"
        " return { left: b.left, right: b.right, top: b.top, bottom: b.bottom, width: b.width, height: b.height } })",
    )


def test_every_figure_is_drawn(opened: Opened) -> None:
    page = opened("sample")
    charts = boxes(page, "svg.chart")
    assert len(charts) == 6
    assert all(box["width"] > 300 and box["height"] > 150 for box in charts)
    for figure in page.query_selector_all("figure:has(svg.chart)"):
        drawn = figure.eval_on_selector_all(
            ".chart .line, .chart .bars, .chart .bar",
            "nodes => nodes.map(n => [n.getBBox().width, n.getBBox().height, getComputedStyle(n).stroke])",
        )
        assert drawn
        assert all(width + height > 4 and stroke not in ("none", "rgb(0, 0, 0)") for width, height, stroke in drawn)
    images = page.eval_on_selector_all("img", "all => all.map(n => [n.naturalWidth, n.clientWidth, n.clientHeight])")
    assert len(images) == 12
    assert all(natural in (28, 32) and width >= 2 * natural and height == width for natural, width, height in images)
    assert page.eval_on_selector("img", "node => getComputedStyle(node).imageRendering") == "pixelated"


def test_hostile_text_stays_text_and_a_thousand_rows_are_sorted(opened: Opened) -> None:
    page = opened("accidents")
    assert page.title() == " ".join(HOSTILE.split())
    assert page.locator("h1").inner_text() == HOSTILE
    assert all(box["width"] > 0 and box["height"] > 0 for box in boxes(page, "svg.chart, img"))
    table = page.locator(".long table")
    table.locator("thead button").nth(1).click()
    found = table.evaluate("table => [...table.tBodies[0].rows].map(row => row.cells[0].innerText)")
    assert [int(name.split()[1]) * 37 % 1000 for name in found] == list(range(999, -1, -1))


def test_table_is_sorted_by_click(opened: Opened) -> None:
    page = opened("unsorted")
    first = column(page, 1)
    assert first == ["0.500", "–\nno figure", "0.250", "∞", "−1.000", "NaN", "10.000", "2.0×10⁻⁹"]
    heads = page.locator("thead th")

    def click(i: int) -> list[str | None]:
        page.locator("thead button").nth(i).click()
        return [heads.nth(j).get_attribute("aria-sort") for j in range(3)]

    missing = ["–\nno figure", "NaN"]  # behind all figures in both directions, in their first order
    assert click(1) == [None, "descending", None]  # the best first
    assert column(page, 1) == ["∞", "10.000", "0.500", "0.250", "2.0×10⁻⁹", "−1.000", *missing]
    assert click(1) == [None, "ascending", None]
    assert column(page, 1) == ["−1.000", "2.0×10⁻⁹", "0.250", "0.500", "10.000", "∞", *missing]
    assert click(1) == [None, None, None]
    assert column(page, 1) == first
    assert click(2) == [None, None, "ascending"]  # the lowest is the best; texts behind figures
    assert column(page, 2) == ["−1.000", "2.0×10⁻⁹", "0.250", "0.500", "10.000", "∞", "x", "NaN"]
    assert click(0) == ["ascending", None, None]
    assert column(page, 0) == ["<b>", "Alpha", "beta", "émile", "omega", "ten 9", "ten 10", "zeta"]


def test_table_is_sorted_by_keyboard(opened: Opened) -> None:
    page = opened("unsorted")
    for _ in range(4):  # the link to the content, the box of the table, two headings
        page.keyboard.press("Tab")
    focus = "(({ activeElement: n }) => [n.tagName, n.innerText, getComputedStyle(n).outlineStyle])(document)"
    tag, text, outline = page.evaluate(focus)
    assert (tag, text.split()[0], outline) == ("BUTTON", "high", "solid")
    page.keyboard.press("Enter")
    assert column(page, 1)[0] == "∞"
    page.keyboard.press("Space")
    assert column(page, 1)[0] == "−1.000"
    assert page.evaluate(focus)[0] == "BUTTON"  # it stays where it is


@pytest.mark.parametrize("name", ["sample", "accidents"])
def test_page_fits_a_phone(opened: Opened, name: str) -> None:
    page = opened(name, width=375)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("document.body.scrollWidth") == 375
    wide = page.locator(".scroll").first
    assert wide.evaluate("node => node.scrollWidth > node.clientWidth")
    wide.evaluate("node => { node.scrollLeft = 150 }")
    box, name_of_row, caption = (
        page.locator(selector).first.bounding_box() for selector in (".scroll", "tbody th", "caption span")
    )
    assert name_of_row["x"] == pytest.approx(box["x"], abs=1)  # names and caption stay in sight
    assert caption["x"] == pytest.approx(box["x"], abs=1)
    assert caption["x"] + caption["width"] <= 375


LABELS = """() => [...document.querySelectorAll("svg.chart")].map(chart =>
  [...chart.querySelectorAll("text")].map(node => node.getBoundingClientRect()).map(
    box => [box.left, box.top, box.right, box.bottom]))"""


def test_labels_of_figures_are_legible_and_apart(opened: Opened) -> None:
    page = opened("sample")
    for width in (1200, 700, 375):
        page.set_viewport_size({"width": width, "height": 800})
        charts = page.evaluate(LABELS)
        assert len(charts) == 6
        for labels in charts:
            assert all(bottom - top >= 11 and left >= 0 and right <= width for left, top, right, bottom in labels)
            for a, b in itertools.combinations(labels, 2):
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 4 or b[3] <= a[1] + 4, (a, b)


TEXTS = """() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
    if (!text || !node.checkVisibility() || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    let ground = node;
    while (ground.parentElement && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)")
      ground = ground.parentElement;
    const style = getComputedStyle(node);
    found.push([text, node.ownerSVGElement ? style.fill : style.color, getComputedStyle(ground).backgroundColor]);
  }
  return found;
}"""
LINES = """() => [...document.querySelectorAll(".line, .mark, .bars, .bar, .axis, .diagonal")].map(
  node => [node.getAttribute("class"), getComputedStyle(node).stroke])"""


def test_both_schemes_can_be_read(opened: Opened) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = opened("sample", scheme=scheme)
        page.locator("summary").click()
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        texts = page.evaluate(TEXTS)
        assert len(texts) > 200
        assert [text for text, front, back in texts if contrast(colour(front), colour(back)) < 4.5] == []
        lines = page.evaluate(LINES)
        assert len(lines) > 50
        assert [kind for kind, stroke in lines if contrast(colour(stroke), colour(ground)) < 3.0] == []
        grounds.append(ground)
    assert grounds[0] == "rgb(255, 255, 255)"
    assert max(colour(grounds[1])) < 50


def test_figures_and_pictures_have_names_for_those_who_listen(opened: Opened) -> None:
    page = opened("sample")
    named = page.get_by_role("img")
    assert named.count() == 6 + 12
    assert page.get_by_role("img", name="Test image 3, a sandal").count() == 1
    assert page.get_by_role("img", name="Scores of test inputs lie around 0.2").count() == 1
    assert all(name for name in page.eval_on_selector_all("[role=img], img", "n => n.map(x => x.ariaLabel || x.alt)"))
    assert page.get_by_role("table", name="Table 1.").count() == 1
    assert page.get_by_role("columnheader", name="lower is better").count() == 4
    assert page.get_by_role("rowheader", name="SWAG").count() == 1
    assert page.get_by_role("region").count() >= 2


def test_page_is_used_without_a_mouse(opened: Opened) -> None:
    page = opened("sample")
    page.keyboard.press("Tab")
    link = page.locator(".skip")
    assert link.evaluate("node => node === document.activeElement")
    assert link.bounding_box()["y"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.locator("summary").focus()
    assert not page.locator(".facts").is_visible()
    page.keyboard.press("Enter")
    assert page.locator(".facts").is_visible()


def test_print_is_light_and_complete(opened: Opened) -> None:
    page = opened("sample", width=720, scheme="dark")
    assert page.get_by_text("Select a heading").first.is_visible()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".facts").bounding_box()["height"] > 50  # shown although it was not opened
    assert not page.get_by_text("Select a heading").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 720
    assert [box for box in boxes(page, "table, svg.chart") if box["right"] > 721] == []
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_everything_but_sorting_works_without_scripts(opened: Opened) -> None:
    page = opened("sample", script=False)
    assert page.locator("thead button").count() == 0
    assert page.get_by_text("Select a heading").count() == 0
    assert page.locator("figure").count() == 9
    page.locator("summary").click()
    assert page.locator(".facts").is_visible()
