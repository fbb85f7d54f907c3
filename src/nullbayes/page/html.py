"""A page as one HTML file: style, script, figures and pictures stand within it, and it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from nullbayes.page.charts import render_curves, render_histograms, render_reliability
from nullbayes.page.document import Block, Curves, Gallery, Histograms, Page, Reliability, Section, Table
from nullbayes.page.markup import element, escaped, prose
from nullbayes.page.pictures import render_gallery
from nullbayes.page.style import CSS, SCRIPT
from nullbayes.page.tables import meanings, render_table

_FEW_SECTIONS = 3  # more get a table of contents


def render(page: Page) -> str:
    """Return a page as the text of one HTML file.

    Parameters
    ----------
    page : Page
        What stands on it.

    Returns
    -------
    str
        To be written as UTF-8. The file opens from disk and needs no network.

    Raises
    ------
    ValueError
        If a row of a table does not fit its columns, or a picture holds something else than bytes.

    Examples
    --------
    >>> from nullbayes.page import Page, Section
    >>> print(render(Page("A title", "What was found.", [Section("First")]))[:15])
    <!doctype html>
    """
    blocks = _rendered(page)
    titles = [section.title.strip() or f"Section {i}" for i, section in enumerate(page.sections, 1)]
    ids = [_identifier(i, title) for i, title in enumerate(titles, 1)]
    parts = [
        f'<header><h1>{escaped(page.title)}</h1><p class="lead">{prose(page.lead)}</p></header>',
        _contents(titles, ids) if len(ids) > _FEW_SECTIONS else "",
        *(_section(*named, blocks) for named in zip(page.sections, titles, ids, strict=True)),
        _facts(page.facts) if page.facts else "",
    ]
    skip = '<a class="skip" href="#content">Skip to the content</a>'
    body = skip + element("main", "".join(parts), id="content", tabindex=-1) + f"<script>{SCRIPT}</script>"
    return f"<!doctype html>\n{element('html', _head(page) + element('body', body), lang='en')}\n"


def _head(page: Page) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode("ascii")
    policy = (  # nothing is loaded, and no script runs but this one
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta name="description" content="{escaped(page.lead)}">'
        f"<title>{escaped(page.title)}</title>"
        '<link rel="icon" href="data:,">'
        f"<style>{CSS}</style></head>\n"
    )


def _contents(titles: Sequence[str], ids: Sequence[str]) -> str:
    links = (f'<a href="#{name}">{escaped(title)}</a>' for title, name in zip(titles, ids, strict=True))
    items = "".join(element("li", link) for link in links)
    return f'<nav aria-labelledby="contents"><b id="contents">Contents</b><ol>{items}</ol></nav>'


def _section(section: Section, title: str, name: str, rendered: Iterator[str]) -> str:
    """A section; the figures that follow each other stand side by side where there is room."""
    parts = [element("h2", escaped(title), id=name)]
    parts += [f"<p>{prose(paragraph)}</p>" for paragraph in section.paragraphs]
    for is_chart, group in groupby(section.blocks, lambda block: not isinstance(block, Table | Gallery)):
        drawn = "\n".join(next(rendered) for _ in group)
        parts.append(element("div", drawn, class_="figures") if is_chart else drawn)
    return "\n" + element("section", "\n".join(parts), aria_labelledby=name)


def _rendered(page: Page) -> Iterator[str]:
    """All tables and figures of a page in their order, each kind with numbers of its own."""
    n_tables = n_figures = 0
    said: dict[tuple[tuple[str, str], ...], int] = {}  # meanings of columns -> the first table with them
    for block in (block for section in page.sections for block in section.blocks):
        if isinstance(block, Table):
            n_tables += 1
            columns = meanings(block)
            yield render_table(block, n_tables, said.get(columns))
            if columns:
                said.setdefault(columns, n_tables)
        else:
            n_figures += 1
            yield _figure(block, n_figures)


def _figure(block: Block, number: int) -> str:
    match block:
        case Curves():
            return render_curves(block, number)
        case Histograms():
            return render_histograms(block, number)
        case Reliability():
            return render_reliability(block, number)
        case Gallery():
            return render_gallery(block, number)
        case _:
            raise TypeError(f"A page shows tables, figures and galleries, not {type(block).__name__}.")


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escaped(name)}</dt><dd>{prose(str(value))}</dd>" for name, value in facts.items())
    return f'<details class="run"><summary>How it was run</summary><dl class="facts">{items}</dl></details>'


def _identifier(i: int, title: str) -> str:
    """A name for links to a section: its number and the plain letters of its title."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode("ascii").lower()
    return "-".join([f"section-{i}", *re.findall(r"[a-z0-9]+", plain)])[:60]
