"""A page is well-formed HTML that loads nothing, escapes everything and shows the figures that it was given."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from nullbayes.page import Column, Gallery, Page, Picture, Section, Table, Value, render
from support.html_tree import Node, colour, contrast, parsed
from support.sample_page import HOSTILE, LONG, accidents, sample

SAMPLE, ACCIDENTS = render(sample()), render(accidents())
both = pytest.mark.parametrize("text", [SAMPLE, ACCIDENTS], ids=["sample", "accidents"])


def shown(*blocks: object) -> Node:
    return parsed(render(Page("Title", "Lead.", [Section("Section", [], blocks)])))  # type: ignore[arg-type]


def cells(tree: Node) -> list[list[Node]]:
    rows = [row for body in tree.all("tbody") for row in body.all("tr")]
    return [[cell for cell in row.children if isinstance(cell, Node)] for row in rows]


def bold(tree: Node, column: int) -> list[str]:
    return [strong.text for row in cells(tree) for strong in row[column].all("strong")]


# --- the page ---------------------------------------------------------------------------------------------------------


@both
def test_page_has_the_structure_that_readers_rely_on(text: str) -> None:
    tree = parsed(text)
    assert text.startswith("<!doctype html>")
    assert [node.attributes["lang"] for node in tree.all("html")] == ["en"]
    metas = {node.attributes.get("name"): node.attributes.get("content") for node in tree.all("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    levels = [int(node.tag[1]) for node in tree.walk() if re.fullmatch(r"h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = [node.attributes["id"] for node in tree.walk() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    links = [node.attributes["href"] for node in tree.all("a")]
    assert links[0] == "#content"
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    assert all(
        node.attributes["aria-labelledby"] in ids for node in tree.walk() if "aria-labelledby" in node.attributes
    )
    assert all(
        node.text.strip()
        for tag in ("a", "h2", "th")
        for node in tree.all(tag)
        if tag != "th" or node.attributes["scope"] == "col"
    )


@both
def test_page_refers_to_nothing_outside_itself(text: str) -> None:
    tree = parsed(text)
    sources = [node.attributes[name] for node in tree.walk() for name in ("src", "srcset") if name in node.attributes]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert [node.attributes["href"] for node in tree.all("link")] == ["data:,"]
    assert len(tree.all("script")) == 1
    style = tree.all("style")[0].text
    assert "url(" not in style
    assert "@import" not in style
    assert not [name for node in tree.walk() for name in node.attributes if name.startswith("on")]


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    tree = parsed(ACCIDENTS)
    assert tree.all("h1")[0].text == HOSTILE
    assert tree.all("title")[0].text == HOSTILE
    assert HOSTILE in tree.all("caption")[0].text
    assert HOSTILE in [node.attributes.get("aria-label") for node in tree.all("svg")]
    assert HOSTILE in [node.attributes["alt"] for node in tree.all("img")]
    assert {node.text for node in tree.all("dl", "facts")[0].all("dt")} == {HOSTILE, LONG}
    assert {node.attributes["src"][:5] for node in tree.all("img")} == {"data:"}


def test_characters_that_cannot_be_written_are_left_out() -> None:
    text = render(Page("a\x00b\ud800c", "", []))
    assert parsed(text).all("h1")[0].text == "abc"
    text.encode("utf-8")


def test_contents_are_listed_for_more_than_three_sections() -> None:
    def page(n: int) -> Node:
        return parsed(render(Page("Title", "Lead.", [Section(f"Part {i}") for i in range(n)])))

    assert not page(3).all("nav")
    assert [node.text for node in page(4).all("nav")[0].all("a")] == ["Part 0", "Part 1", "Part 2", "Part 3"]


def test_sections_with_the_same_title_have_names_of_their_own() -> None:
    tree = parsed(render(Page("Title", "Lead.", [Section("Été & hiver"), Section("Été & hiver"), Section("…")])))
    assert [node.attributes["id"] for node in tree.all("h2")] == [
        "section-1-ete-hiver",
        "section-2-ete-hiver",
        "section-3",
    ]


def test_facts_stand_behind_a_summary() -> None:
    details = parsed(SAMPLE).all("details")
    assert [node.text for node in details[0].all("summary")] == ["How it was run"]
    facts = sample().facts
    assert [node.text for node in details[0].all("dt")] == list(facts)
    assert [node.text for node in details[0].all("dd")] == [value.replace("`", "") for value in facts.values()]
    assert not parsed(render(Page("Title", "Lead.", []))).all("details")


def test_backticks_make_code_and_a_single_one_stays() -> None:
    tree = parsed(render(Page("Title", "Use `fit(<x>)` and `", [])))
    lead = tree.all("p", "lead")[0]
    assert [node.text for node in lead.all("code")] == ["fit(<x>)"]
    assert lead.text == "Use fit(<x>) and `"


# --- tables -----------------------------------------------------------------------------------------------------------


def column_of(values: list[float | None], best: str | None, digits: int = 3) -> Table:
    rows = [[f"row {i}", None if value is None else Value(value)] for i, value in enumerate(values)]
    return Table("Caption", [Column("name"), Column("figure", "", best, digits)], rows)


@pytest.mark.parametrize(
    ("values", "best", "digits", "expected"),
    [
        ([0.5, 0.7, 0.6], "high", 3, ["0.700"]),
        ([0.5, 0.7, 0.6], "low", 3, ["0.500"]),
        ([0.5, 0.7, 0.6], None, 3, []),
        ([0.9134, 0.9131, 0.9128, 0.9], "high", 3, ["0.913", "0.913", "0.913"]),
        ([0.9134, 0.9131, 0.9128], "high", 4, ["0.9134"]),
        ([-2.0, -1.0], "high", 1, ["−1.0"]),
        ([None, 0.2, math.nan, 0.1], "high", 2, ["0.20"]),
        ([math.nan, math.nan], "high", 2, []),
        ([0.3], "high", 2, []),
        ([0.00001, 0.00004, 0.2], "low", 3, ["1.0×10⁻⁵"]),
    ],
)
def test_best_figures_are_bold_and_ties_as_they_are_written(
    values: list[float | None], best: str | None, digits: int, expected: list[str]
) -> None:
    assert bold(shown(column_of(values, best, digits)), 1) == expected


def test_cell_has_our_figure_its_spread_and_the_papers() -> None:
    table = Table("Caption", [Column("name"), Column("figure")], [
        ["both", Value(0.99812, 0.00151, 0.8672)],
        ["ours", Value(-0.5)],
        ["theirs", Value(None, None, 0.25)],
        ["none", None],
        ["odd", Value(math.nan, math.nan, math.inf)],
    ], source="table 2")  # fmt: skip
    tree = shown(table)
    found = [
        (row[0].text, [node.text for node in row[1].all("span") if {"ours", "paper"} & {*node.classes}])
        for row in cells(tree)
    ]
    assert found == [
        ("both", ["0.998 ± 0.002", "paper: 0.867"]),
        ("ours", ["−0.500"]),
        ("theirs", ["–", "paper: 0.250"]),
        ("none", []),
        ("odd", ["NaN", "paper: ∞"]),
    ]
    assert [row[1].attributes["data-sort"] for row in cells(tree)] == ["0.99812", "-0.5", "", "", ""]
    note = tree.all("p", "note")[0].text
    assert "standard deviation over seeds" in note
    assert "the paper’s (table 2)" in note
    assert all(row[0].tag == "th" and row[0].attributes["scope"] == "row" for row in cells(tree))


def test_notes_say_only_what_the_table_has() -> None:
    assert shown(column_of([1.0, 2.0], None)).all("p", "note")[0].text == ""


def test_meanings_of_columns_are_said_once() -> None:
    first, second = parsed(SAMPLE).all("div", "table")
    terms = [node.text for node in first.all("dl")[0].all("dt")]
    assert terms == ["accuracy", "NLL", "ECE", "AUROC KMNIST", "AUROC MNIST", "seconds"]
    assert not second.all("dl")
    assert [node.attributes["href"] for node in second.all("a")] == [f"#{first.attributes['id']}"]


def test_heading_above_the_names_may_be_left_out() -> None:
    tree = shown(Table("Caption", [Column("figure")], [["a", Value(1.0)], ["b", Value(2.0)]]))
    assert [node.text for node in tree.all("thead")[0].all("th")] == ["name", "figure"]


def test_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="Row 1 of the table 'Caption' has 1 cells for 2 columns"):
        shown(Table("Caption", [Column("name"), Column("figure")], [["a", Value(1.0)], ["b"]]))


def test_a_thousand_rows_are_all_there() -> None:
    [table] = [node for node in parsed(ACCIDENTS).all("table") if "A thousand rows" in node.text]
    assert [row[0].text for row in cells(table)] == [f"row {i}" for i in range(1000)]
    [box] = parsed(ACCIDENTS).all("div", "long")
    assert box.attributes["tabindex"] == "0"  # it scrolls, and has to do so without a mouse


def test_empty_tables_say_so() -> None:
    assert [row[0].text for row in cells(shown(Table("Caption", [Column("a"), Column("b")], [])))] == ["No rows."]
    assert [row[0].text for row in cells(shown(Table("Caption", [], [])))] == ["No rows."]


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_have_texts_for_those_who_cannot_see_them() -> None:
    tree = parsed(SAMPLE)
    assert all(node.attributes["alt"].strip() for node in tree.all("img"))
    assert all(node.attributes["aria-label"].strip() for node in tree.all("svg") if "role" in node.attributes)
    assert all({"role", "aria-hidden"} & {*node.attributes} for node in tree.all("svg"))


def test_input_that_is_no_image_is_quoted() -> None:
    pictures = [Picture([], "p = 0.1", "", text="a query"), Picture([], "only this", "")]
    tree = shown(Gallery("Caption", pictures))
    assert [node.text for node in tree.all("blockquote")] == ["a query", "only this"]
    assert [node.text for node in tree.all("p", "label")] == ["p = 0.1"]
    assert not tree.all("img")


# --- colours ----------------------------------------------------------------------------------------------------------


def schemes() -> dict[str, dict[str, str]]:
    """The variables of the light and of the dark scheme, read from the style of the page."""
    light, dark = re.findall(r":root\s*\{([^}]*)\}", parsed(SAMPLE).all("style")[0].text)
    return {
        name: dict(re.findall(r"(--\w+):\s*(#[0-9a-f]{6})", block))
        for name, block in (("light", light), ("dark", dark))
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_the_page(scheme: str) -> None:
    found = {name: colour(value) for name, value in schemes()[scheme].items()}
    assert set(found) == {name for other in schemes().values() for name in other}, "a scheme lacks a colour"
    for ground in ("--page", "--card"):
        for name in ("--text", "--muted", "--link"):
            assert contrast(found[name], found[ground]) >= 4.5, (name, ground)
    lines = [name for name in found if re.fullmatch(r"--c\d", name)]
    assert len(lines) == 6
    for name in lines:
        assert contrast(found[name], found["--page"]) >= 3.0, name


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast(colour("#000000"), colour("#ffffff")) == pytest.approx(21.0)
    assert contrast(colour("#777777"), colour("rgb(255, 255, 255)")) == pytest.approx(4.48, abs=0.005)
