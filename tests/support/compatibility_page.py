"""Write `docs/compatibility.md` from the table of models: `python tests/compatibility/document.py`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nullbayes.errors import NullBayesError
from support.compatibility_table import CASES, REFUSED

FILE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD = """\
# What works, by which route, and what is refused

Made from the table in `tests/model_table.py` by `make docs`; every line of it is a test, against derivatives that are
taken one by one in float64 and checked by differences.

**Rows** of the Jacobian on the training data come *by layers* (one backward pass an output gives the rows of all
examples), by *vmap(jacrev)* where a parameter belongs to no layer that has a rule, or *example by example* where `vmap`
does not know an operation or has it wrong. Which one is found out when a posterior is fitted: rows are compared with
plain differentiation, all of them once. **Predictions** take *forward mode* or, where torch has none for an
operation or has it wrong, *rows* as well; with fewer outputs than samples rows are the faster way in any case. The
report of a fit says which routes were taken. Switches of torch that stand in the way (fused attention, oneDNN's and
cuDNN's recurrent layers, reduced precision) are set for as long as a computation needs it, then put back.
The routes are those on a CPU; other devices have other kernels.
"""


def document() -> str:
    """The text."""
    lines = [HEAD]
    for group, cases in groupby(CASES, key=lambda case: case.group):
        lines += [f"## {group}\n", "| | rows | predictions | posteriors |", "|---|---|---|---|"]
        for case in cases:
            posteriors = "loss-projected" if case.only_loss else "both"
            lines.append(f"| {case.name} | {case.rows} | {case.predictions} | {posteriors} |")
        lines.append("")
    lines += ["## Refused, with the sentence that says what to change\n", "| | |", "|---|---|"]
    for name, attempt in REFUSED.items():
        try:
            attempt()
        except NullBayesError as error:
            sentence = " ".join(str(error).split()).replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| {name} | {sentence} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(document())
