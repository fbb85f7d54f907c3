"""What the pages on CelebA and ImageNet share: the methods that could be fitted, their figures, and what they took."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from nullbayes.experiments.frame import Results
from nullbayes.experiments.summary import value
from nullbayes.page import Column, Section, Table, Value

Cells = list[str | Value | None]


def fitted(results: Results) -> dict[str, list[Results]]:
    """Return what each method gave, for the seeds in which it could be fitted."""
    found = {name: [s for s in seeds if "failed" not in s] for name, seeds in results["methods"].items()}
    return {name: seeds for name, seeds in found.items() if seeds}


def cell(seeds: Sequence[Any], *keys: str, paper: float | None = None, scale: float = 1.0) -> Value | None:
    """Return mean and spread of a figure, which keys lead to, over the seeds that have one."""
    found = (functools.reduce(lambda part, key: part.get(key), keys, each) for each in seeds)
    return value([scale * number for number in found if number is not None], paper)


def cost(results: Results) -> Section:
    """Return what the fits took and found, which methods are left out, and what the library warned of."""
    columns = [
        Column("Method"), Column("Seconds", "Of the fit.", "low", 1), Column("Memory, MB", "At the peak.", None, 0),
        Column("Rank", "Directions that the method found.", None, 0),
        Column("Residual", "Share of the noise's effect that is left after the projection.", "low"),
        Column("Prior precision", "As chosen on validation images.", None, 0),
    ]  # fmt: skip
    rows, warned = list[Cells](), list[Cells]()
    for name, seeds in fitted(results).items():
        others = (cell(seeds, key) for key in ("rank", "residual", "precision"))
        if (seconds := cell(seeds, "seconds")) is not None:
            rows.append([name, seconds, cell(seeds, "memory", scale=1e-6), *others])
        warned += [[name, note] for note in seeds[0]["notes"]]
    failed = {name: s["failed"] for name, seeds in results["methods"].items() for s in seeds if "failed" in s}
    tables = [Table("Cost of the fits", columns, rows)]
    if warned:
        tables.append(
            Table("What the library warned of, in the first seed", [Column("Method"), Column("Note")], warned)
        )
    return Section("What it took", [f"Left out: {name}. {reason}" for name, reason in failed.items()], tables)


def images(results: Results) -> Table:
    """Return how many images there were of each kind."""
    counts: list[Cells] = [[name, Value(count)] for name, count in results["images"].items()]
    return Table("Images", [Column("Set"), Column("Images", "", None, 0)], counts)


def quickly(results: Results) -> str:
    """Return what the lead of a page says of a quick run."""
    return " This was a quick run, on few images: its figures mean little." if results["quick"] else ""
