"""What stands on a page, as values: nothing here knows HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """A figure of a table.

    Attributes
    ----------
    mean : float or None
        Over the seeds, or the only one; None or NaN where there is none.
    spread : float or None
        Standard deviation over the seeds; None for one seed.
    paper : float or None
        What the paper has in this place.
    """

    mean: float | None
    spread: float | None = None
    paper: float | None = None


@dataclass(frozen=True)
class Column:
    """The head of a column.

    Attributes
    ----------
    name : str
        What stands above it.
    meaning : str
        Its definition, in one sentence.
    best : "high", "low" or None
        Which end is better: the best figure is bold.
    digits : int
        Behind the point.
    """

    name: str
    meaning: str = ""
    best: str | None = None
    digits: int = 3


@dataclass(frozen=True)
class Table:
    """Figures in rows and columns, which the reader can sort.

    Attributes
    ----------
    caption : str
        What the table shows.
    columns : sequence of Column
        One for each cell of a row. The one above the names of the rows may be left out.
    rows : sequence of rows
        The first cell of a row is its name.
    source : str
        Where the paper has its figures, such as "table 2".
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Value | None]]
    source: str = ""


@dataclass(frozen=True)
class Series:
    """Points of a curve, with a band of one standard deviation around it where ``spread`` is given.

    A point with a coordinate that is None, NaN or infinite is left out, and the curve is broken there.
    """

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    spread: Sequence[float | None] | None = None
    points_only: bool = False  # data rather than a curve


@dataclass(frozen=True)
class Curves:
    """Curves in one frame."""

    caption: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    alt: str  # what the figure shows, for those who cannot see it
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None  # what of the vertical axis is shown; None: all of the data


@dataclass(frozen=True)
class Histograms:
    """Shares of inputs by score, one histogram per set of inputs, over common bins."""

    caption: str
    x_label: str
    edges: Sequence[float | None]
    shares: Mapping[str, Sequence[float | None]]  # one less than the edges
    alt: str
    threshold: float | None = None  # inputs with a higher score are flagged


@dataclass(frozen=True)
class Reliability:
    """Accuracy by confidence: for each bin its number of predictions, their mean confidence and accuracy.

    The bins divide the interval from 0 to 1 into equal parts.
    """

    caption: str
    count: Sequence[float | None]
    confidence: Sequence[float | None]
    accuracy: Sequence[float | None]
    alt: str


@dataclass(frozen=True)
class Picture:
    """An input with what is said of it.

    Attributes
    ----------
    image : nested sequences of int
        Bytes (H, W) or (H, W, 3). Empty for an input that is no image; then ``text`` or ``label`` shows it.
    label : str
        Below the picture, such as "p = 0.001".
    alt : str
        What the picture shows.
    text : str
        The input itself, if it is text: shown as a quotation, with ``label`` below it.
    """

    image: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
    label: str
    alt: str
    text: str = ""


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side: ``columns`` of them in a row, or as many as there is room for."""

    caption: str
    pictures: Sequence[Picture]
    columns: int | None = None


Block = Table | Curves | Histograms | Reliability | Gallery


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and what stands below them.

    What stands between backticks in a paragraph is shown as code; everything else is plain text.
    """

    title: str
    paragraphs: Sequence[str] = ()
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes
    ----------
    title, lead : str
        What it is about, and its result in one or two sentences.
    sections : sequence of Section
        In the order of reading.
    facts : mapping of str
        How it was run: command, commit, versions, device, seconds.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    facts: Mapping[str, str] = field(default_factory=dict)
