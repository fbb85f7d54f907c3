"""Tables as HTML: our figures with the paper's below them, the best of each column bold, sorted by their headings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nullbayes.page.document import Column, Table, Value
from nullbayes.page.markup import element, escaped, hidden, prose
from nullbayes.page.numerals import figure, fixed, is_number, is_out_of_reach, scientific

Cell = str | Value | None
_LONG = 40  # rows; a longer table scrolls within a box of its own
_ARROWS = {"high": "↑", "low": "↓"}
_HINTS = {"high": ", higher is better", "low": ", lower is better"}


def render_table(table: Table, number: int, same_columns: int | None = None) -> str:
    """Return a table as HTML, with what its columns mean below it, unless table ``same_columns`` has said it already.

    A row with more or fewer cells than there are columns is refused.
    """
    columns = _all_columns(table)
    kinds = [_is_text(table.rows, i) for i in range(len(columns))]
    best = [_best(table.rows, i, column) for i, column in enumerate(columns)]
    heads = "".join(_head(column, text) for column, text in zip(columns, kinds, strict=True))
    widths = [_spread_width(table.rows, i, column) for i, column in enumerate(columns)]
    rows = [
        element(
            "tr",
            "".join(
                _cell(cell, columns[i], is_name=i == 0, is_text=kinds[i], best=best[i], width=widths[i])
                for i, cell in enumerate(row)
            ),
        )
        for row in table.rows
    ]
    if not rows:
        rows = [f'<tr><td class="empty" colspan="{max(len(columns), 1)}">No rows.</td></tr>']
    label = f"Table {number}"
    caption = f'<caption><span class="caption"><b>{label}.</b> {prose(table.caption)}</span></caption>'
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    scroll = element(
        "div",
        element("table", caption + inner, class_="sortable" if len(table.rows) > 1 else None),
        class_="scroll long" if len(table.rows) > _LONG else "scroll",
        tabindex=0,
        role="region",
        aria_label=f"{label}: {table.caption}",
    )
    notes = _notes(table, columns, same_columns)
    return element("div", scroll + notes, class_="table", id=f"table-{number}")


def meanings(table: Table) -> tuple[tuple[str, str], ...]:
    """Return the names of a table's columns with what they mean, where that is said."""
    return tuple((column.name, column.meaning) for column in table.columns if column.meaning)


def _all_columns(table: Table) -> list[Column]:
    """The columns, one for each cell of a row."""
    columns = list(table.columns)
    if table.rows and all(len(row) == len(columns) + 1 for row in table.rows):
        return [Column(""), *columns]
    for i, row in enumerate(table.rows):
        if len(row) != len(columns):
            raise ValueError(
                f"Row {i} of the table {table.caption!r} has {len(row)} cells for {len(columns)} columns: "
                "give one cell for each column, None where there is no figure."
            )
    return columns


def _is_text(rows: Sequence[Sequence[Cell]], i: int) -> bool:
    cells = [row[i] for row in rows if row[i] is not None]
    return i == 0 or (bool(cells) and all(isinstance(cell, str) for cell in cells))


def _number(cell: Cell) -> float | None:
    """The figure of a cell that can be the best: not NaN."""
    if not isinstance(cell, Value) or cell.mean is None or math.isnan(cell.mean):
        return None
    return float(cell.mean)


def _best(rows: Sequence[Sequence[Cell]], i: int, column: Column) -> str | None:
    """How the best figure of a column is written: all that are written like it are best. None for less than two."""
    numbers = [number for row in rows if (number := _number(row[i])) is not None]
    if column.best not in _ARROWS or len(numbers) < 2:
        return None
    return figure(max(numbers) if column.best == "high" else min(numbers), column.digits)


def _spread_width(rows: Sequence[Sequence[Cell]], i: int, column: Column) -> int:
    """The number of characters behind the mean in the widest cell of a column."""
    cells = [row[i] for row in rows]
    return max((len(_spread(cell, column)) for cell in cells if isinstance(cell, Value)), default=0)


def _spread(cell: Value, column: Column) -> str:
    if cell.spread is None or cell.mean is None or math.isnan(cell.spread) or not is_number(cell.mean):
        return ""
    if is_out_of_reach(cell.mean, column.digits):
        return f" ± {scientific(cell.spread)}"
    return f" ± {fixed(cell.spread, column.digits)}"


def _head(column: Column, is_text: bool) -> str:
    arrow = ""
    if column.best in _ARROWS:
        sign = f'<span class="arrow" aria-hidden="true">{_ARROWS[column.best]}</span>'
        arrow = f"\N{NO-BREAK SPACE}{sign}{hidden(_HINTS[column.best])}"
    first = "ascending" if is_text or column.best == "low" else "descending"
    name = f'<span class="head">{escaped(column.name) or hidden("name")}{arrow}</span>'
    return element("th", name, scope="col", class_=None if is_text else "n", data_first=first)


def _cell(cell: Cell, column: Column, *, is_name: bool, is_text: bool, best: str | None, width: int) -> str:
    tag, scope = ("th", "row") if is_name else ("td", None)
    kind, room = None if is_text else "n", _behind("", width)
    if isinstance(cell, str):
        return element(tag, f'<span class="name">{escaped(cell)}</span>', scope=scope, class_=kind)
    if cell is None or (cell.mean is None and cell.paper is None):
        dash = f'<span aria-hidden="true">–</span>{hidden("no figure")}{room}'
        return element(tag, dash, scope=scope, class_=kind, data_sort="")
    number = _number(cell)
    shown = "–" if cell.mean is None else escaped(figure(float(cell.mean), column.digits))
    if best is not None and shown == best:
        shown = f"<strong>{shown}</strong>"
    lines = f'<span class="ours">{shown}{_behind(_spread(cell, column), width)}</span>'
    if cell.paper is not None:
        paper = escaped(figure(float(cell.paper), column.digits))
        lines += f'<span class="paper">{hidden("paper: ")}{paper}{room}</span>'
    return element(tag, lines, scope=scope, class_=kind, data_sort="" if number is None else _for_script(number))


def _behind(spread: str, width: int) -> str:
    """A spread that takes the room of the widest one of its column, so that all means end below each other."""
    return f'<span class="spread" style="min-width:{0.85 * width:.2f}ch">{spread}</span>' if width else ""


def _for_script(number: float) -> str:
    """A number as JavaScript reads it."""
    return repr(number) if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")


def _notes(table: Table, columns: Sequence[Column], same_columns: int | None) -> str:
    """How to read the table, and what its columns mean."""
    values = [cell for row in table.rows for cell in row if isinstance(cell, Value)]
    said = []
    if any(column.best for column in columns) and values:
        said.append("Bold: the best of a column (↑ higher is better, ↓ lower is better).")
    if any(value.spread is not None for value in values):
        said.append("±: standard deviation over seeds.")
    if any(value.paper is not None for value in values):
        source = f" ({prose(table.source)})" if table.source else ""
        said.append(f'<span class="paper">Small figures</span> below ours: the paper’s{source}.')
    if same_columns is not None:
        said.append(f'Columns as in <a href="#table-{same_columns}">table {same_columns}</a>.')
    notes = f'<p class="note">{" ".join(said)}</p>'
    defined = meanings(table) if same_columns is None else ()
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{prose(meaning)}</dd></div>" for name, meaning in defined)
    return notes + (element("dl", items, class_="meanings") if items else "")
