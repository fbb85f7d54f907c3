"""The table of an evaluation: as text, in Markdown, and for pandas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nullbayes.errors import optional
from nullbayes.evaluation.entries import CALIBRATED
from nullbayes.evaluation.judging import LEVEL

if TYPE_CHECKING:
    import pandas as pd

    from nullbayes.evaluation.results import Detection, Evaluation, EvaluationRow

WIDTH = 120
_LONGEST_NAME = 36
_ALIKE = 1.1  # how many times as large as another a noise is without a word
_GAP, _GROUP_GAP = "  ", "    "
_ARROWS = {"higher": " ↑", "lower": " ↓"}
_MEANINGS = {
    "ECE": "expected calibration error, the gap between confidence and accuracy",
    "AURC": "mean loss of the predictions that are kept while the score rejects the strangest inputs",
    "AUROC": "probability that a strange input scores higher than a familiar one",
    "AUPR": "average precision of finding the strange inputs; chance is their share",
    "FPR95": "share of familiar inputs flagged where 95 % of the strange ones are",
    "MiB": "memory of the fit at its peak, beyond what the process held before it",
}


@dataclass(frozen=True)
class Column:
    """One figure of all rows."""

    group: str  # the data that it is measured on
    label: str
    name: str  # of the attribute of a row, or of what it has about a set of strangers
    digits: str  # how numbers are written
    best: str | float | None  # "higher", "lower", the number that it should be close to, or None
    stranger: str | None = None
    unit: float = 1.0

    @property
    def title(self) -> str:
        """The label with the direction in which it is better."""
        return self.label + _ARROWS.get(str(self.best), "")

    def value(self, row: EvaluationRow) -> float | None:
        """Return the number of a row, if it has one."""
        value: float | None = getattr(self._place(row), self.name)
        return None if value is None else value / self.unit

    def interval(self, row: EvaluationRow) -> tuple[float, float] | None:
        """Return the interval of that number, if there is one."""
        return self._place(row).intervals.get(self.name)

    def _place(self, row: EvaluationRow) -> EvaluationRow | Detection:
        return row if self.stranger is None else row.strangers[self.stranger]

    def written(self, row: EvaluationRow) -> str:
        """Return the number of a row, and its interval."""
        value, ends = self.value(row), self.interval(row)
        if value is None:
            return "-"
        text = format(value, self.digits)
        return text if ends is None else f"{text} [{ends[0]:{self.digits}}, {ends[1]:{self.digits}}]"

    def winners(self, rows: tuple[EvaluationRow, ...]) -> set[str]:
        """Return the names of the best rows, as far as the written digits tell; none if there is nothing to compare."""
        values = {row.name: value for row in rows if (value := self.value(row)) is not None}
        if self.best is None or len(values) < 2:
            return set()
        sign = -1.0 if self.best == "higher" else 1.0
        cost = {n: abs(v - self.best) if isinstance(self.best, float) else sign * v for n, v in values.items()}
        lowest = format(values[min(cost, key=lambda name: cost[name])], self.digits)
        return {name for name, value in values.items() if format(value, self.digits) == lowest}


def columns(evaluation: Evaluation) -> list[Column]:
    """Return the columns that have a number in some row."""
    found = [*_familiar(evaluation), *_strange(evaluation), *_costs()]
    return [column for column in found if any(column.value(row) is not None for row in evaluation.rows)]


def _familiar(evaluation: Evaluation) -> Iterator[Column]:
    group, numbers = f"familiar ({evaluation.n_familiar:,})", any(row.rmse is not None for row in evaluation.rows)
    loss = ".4g" if numbers else ".4f"  # squared errors have any size
    named: list[tuple[str, str, str, str | float | None]] = [
        ("accuracy", "accuracy", ".3f", "higher"),
        ("rmse", "RMSE", ".4g", "lower"),
        ("nll", "NLL", loss, "lower"),
        ("ece", "ECE", ".3f", "lower"),
        ("coverage", f"in {LEVEL:.0%}", ".3f", LEVEL),
        ("aurc", "AURC", loss, "lower"),
        ("false_alarms", "false alarms", ".3f", None),
    ]
    for name, label, digits, best in named:
        yield Column(group, label, name, digits, best)


def _strange(evaluation: Evaluation) -> Iterator[Column]:
    for stranger, n in evaluation.n_strangers.items():
        named: list[tuple[str, str, str | None]] = [
            ("auroc", "AUROC", "higher"),
            ("aupr", "AUPR", "higher"),
            ("fpr95", "FPR95", "lower"),
            ("flagged", "flagged", None),  # more is better only where false alarms are as many
        ]
        for name, label, best in named:
            yield Column(f"{stranger} ({n:,})", label, name, ".3f", best, stranger)


def _costs() -> Iterator[Column]:
    yield Column("cost", "fit s", "fit_seconds", ".3g", "lower")
    yield Column("cost", "s per 1,000", "seconds_per_1000", ".3g", "lower")
    yield Column("cost", "MiB", "peak_memory", ",.0f", "lower", unit=2.0**20)


# --- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cells:
    """A column as text: its title and one cell per row, all of the same width."""

    group: str
    title: str
    cells: list[str]

    @property
    def width(self) -> int:
        return len(self.title)

    def widened(self, by: int) -> _Cells:
        return _Cells(self.group, " " * by + self.title, [" " * by + cell for cell in self.cells])


def as_text(evaluation: Evaluation) -> str:
    """Return blocks of at most 120 columns, each with the names of the rows."""
    names = ["method", *(_shortened(row.name, _LONGEST_NAME) for row in evaluation.rows)]
    width = max(map(len, names))
    names = [f"{name:<{width}}" for name in names]
    blocks = _packed([_cells(column, evaluation.rows) for column in columns(evaluation)], WIDTH - width)
    legend = "↑ higher, ↓ lower is better"
    if any("*" in cell for block in blocks for cells in block for cell in cells.cells):
        legend = f"* best method of its column, ties share it; {legend}"
    if any(row.intervals or any(found.intervals for found in row.strangers.values()) for row in evaluation.rows):
        legend += "; [,] 90 % interval over resampled examples"
    shown = {cells.title.split()[0] for block in blocks for cells in block}
    legend += "".join(f"\n{label}: {meaning}" for label, meaning in _MEANINGS.items() if label in shown)
    notes = (_judged(evaluation.rows), _unlike(evaluation.rows), _unchosen(evaluation.rows), _noisy(evaluation.rows))
    return "\n\n".join([*(_block(names, block) for block in blocks), legend + "".join(notes)])


def _judged(rows: tuple[EvaluationRow, ...]) -> str:
    """Say by which score each method is judged, where they differ and the rows do not say so."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        calibrated = f"{row.calibrated_by}, calibrated" if row.calibrated_by else row.score
        methods.setdefault(calibrated.replace("_", " "), []).append(row.label)
    if len(methods) < 2 or len({row.label for row in rows}) < len(rows):
        return ""
    return "\njudged by: " + "; ".join(f"{score} ({_some(names)})" for score, names in methods.items())


def _unlike(rows: tuple[EvaluationRow, ...]) -> str:
    """Say which methods are not calibrated beside others that are."""
    calibrated = {row.label for row in rows if row.score == CALIBRATED}
    others = dict.fromkeys(row.label for row in rows if row.label not in calibrated)
    if not (calibrated and others):
        return ""
    how = "call calibrate(held_out) on all methods, or on none, to compare like with like"
    return f"\nnot calibrated: {_some(others)}; {how}"


def _unchosen(rows: tuple[EvaluationRow, ...]) -> str:
    """Say which methods predict at the default prior precision."""
    found = dict.fromkeys(row.label for row in rows if row.default_precision and row.nll is not None)
    if not found:
        return ""
    return f"\nat the default prior precision of 1: {_some(found)}; optimize_prior_precision(held_out) chooses one"


def _noisy(rows: tuple[EvaluationRow, ...]) -> str:
    """Say with which noise the methods of a regression predict, where it makes a difference between them."""
    rows = tuple(row for row in rows if row.noise and row.nll is not None)
    if all(max(noises) <= _ALIKE * min(noises) for noises in zip(*(row.noise for row in rows), strict=False)):
        return ""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        found.setdefault(_some(f"{noise:.2g}" for noise in row.noise), {})[row.label] = None
    noises = "; ".join(f"{noise} ({_some(names)})" for noise, names in found.items())
    how = "likelihood=nb.likelihoods.Regression(sigma_noise=...) gives all methods the same"
    return f"\nnoise of the targets, which NLL and intervals depend on: {noises}\n{how}"


def _some(names: Iterable[str]) -> str:
    """Return a few names as a list."""
    first = list(names)
    return ", ".join(first[:3]) + ", ..." * (len(first) > 3)


def _cells(column: Column, rows: tuple[EvaluationRow, ...]) -> _Cells:
    best = column.winners(rows)
    cells = [column.written(row) + ("*" if row.name in best else " ") for row in rows]
    width = max(len(column.title) + 1, *map(len, cells))
    return _Cells(column.group, f"{column.title} ".rjust(width), [cell.rjust(width) for cell in cells])


def _packed(found: list[_Cells], room: int) -> list[list[_Cells]]:
    """Put columns into blocks, those of a group together where a block has room for them."""
    groups: dict[str, list[_Cells]] = {}
    for cells in found:
        groups.setdefault(cells.group, []).append(cells)
    blocks: list[list[_Cells]] = [[]]
    for label, group in groups.items():
        lacking = min(len(label), _LONGEST_NAME) + len(_GROUP_GAP) - _width(group)
        if lacking > 0:
            group[0] = group[0].widened(lacking)
        if blocks[-1] and _width([*blocks[-1], *group]) > room:
            blocks.append([])
        for cells in group:
            if blocks[-1] and _width([*blocks[-1], cells]) > room:
                blocks.append([])
            blocks[-1].append(cells)
    return blocks


def _width(block: list[_Cells]) -> int:
    return sum(cells.width + len(gap) for cells, gap in zip(block, _gaps(block), strict=True))


def _gaps(block: list[_Cells]) -> list[str]:
    """Return the space before each column."""
    before = [None, *(cells.group for cells in block)]
    return [_GAP if cells.group == last else _GROUP_GAP for cells, last in zip(block, before, strict=False)]


def _block(names: list[str], block: list[_Cells]) -> str:
    gaps, head = _gaps(block), " " * len(names[0])
    starts = [i for i, gap in enumerate(gaps) if gap == _GROUP_GAP]
    for start, stop in zip(starts, [*starts[1:], len(block)], strict=True):
        width = sum(cells.width for cells in block[start:stop]) + len(_GAP) * (stop - start - 1)
        head += _GROUP_GAP + _shortened(block[start].group, width).center(width)
    lines = [head, names[0] + "".join(gap + cells.title for cells, gap in zip(block, gaps, strict=True))]
    for i, name in enumerate(names[1:]):
        lines.append(name + "".join(gap + cells.cells[i] for cells, gap in zip(block, gaps, strict=True)))
    return "\n".join(line.rstrip() for line in lines)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


# --- Markdown and pandas ----------------------------------------------------------------------------------------------


def as_markdown(evaluation: Evaluation) -> str:
    """Return one table in Markdown, with the best of each column in bold."""
    found = columns(evaluation)
    best = [column.winners(evaluation.rows) for column in found]
    lines = [["method", *(f"{column.group}: {column.title}" for column in found)], ["---", *("---:" for _ in found)]]
    for row in evaluation.rows:
        written = (column.written(row) for column in found)
        bold = (f"**{text}**" if row.name in names else text for text, names in zip(written, best, strict=True))
        lines.append([row.name, *bold])
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def as_pandas(evaluation: Evaluation) -> pd.DataFrame:
    """Return a table with one row per method and score, and columns (set, figure)."""
    with optional("to_pandas()"):
        import pandas as pd

    values: dict[tuple[str, str], list[Any]] = {}
    for column in columns(evaluation):
        group = column.group.rpartition(" (")[0] or column.group
        values[group, column.label] = [column.value(row) for row in evaluation.rows]
        ends = [column.interval(row) for row in evaluation.rows]
        for i, end in enumerate(("low", "high") if any(ends) else ()):
            values[group, f"{column.label} {end}"] = [None if pair is None else pair[i] for pair in ends]
    index = pd.Index([row.name for row in evaluation.rows], name="method")
    return pd.DataFrame(values, index=index, dtype=float)
