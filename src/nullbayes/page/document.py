"""What stands on a page, as values: nothing here knows HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """A figure of a table.

    Attributes
    ----------
    mean : float
        Over the seeds, or the only one.
    spread : float or None
        Standard deviation over the seeds; None for one seed.
    paper : float or None
        What the paper has in this place.
    """

    mean: float
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
    """Figures in rows and columns, which the reader can sort."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Value | None]]  # the first cell is the name of the row


@dataclass(frozen=True)
class Series:
    """Points of a curve, with a band of one standard deviation around it where ``spread`` is given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
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


@dataclass(frozen=True)
class Histograms:
    """Shares of inputs by score, one histogram per set of inputs, over common bins."""

    caption: str
    x_label: str
    edges: Sequence[float]
    shares: Mapping[str, Sequence[float]]  # one less than the edges
    alt: str


@dataclass(frozen=True)
class Reliability:
    """Accuracy by confidence: for each bin its number of predictions, their mean confidence and accuracy."""

    caption: str
    count: Sequence[float]
    confidence: Sequence[float]
    accuracy: Sequence[float]
    alt: str


@dataclass(frozen=True)
class Picture:
    """An input with what is said of it.

    Attributes
    ----------
    image : nested sequences of int
        Bytes (H, W) or (H, W, 3). Empty for an input that is no image; then ``label`` shows it.
    label : str
        Below the picture, such as "p = 0.001".
    alt : str
        What the picture shows.
    """

    image: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
    label: str
    alt: str


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side."""

    caption: str
    pictures: Sequence[Picture]


Block = Table | Curves | Histograms | Reliability | Gallery


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and what stands below them."""

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
