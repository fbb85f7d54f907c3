"""Write `docs/compatibility.md` from `support/compatibility_table.py`: run `make docs`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from nullbayes.errors import NullBayesError
from support.compatibility_table import CASES, REFUSED

FILE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD = """\
# What works, by which route, and what is refused

`make docs` writes this page from the table in `tests/support/compatibility_table.py`. Every line is a test, which
compares the derivatives with derivatives that are computed one by one in float64 and checked by finite differences.

**Rows** are the gradients of the outputs (or of the losses) on the training data. They are computed

- *by layers*, where every parameter belongs to a layer that has a rule: one backward pass per output gives the rows of
  all examples;
- by *vmap(jacrev)*, where a parameter belongs to no layer that has a rule;
- *example by example*, where `vmap` does not support an operation or computes it wrongly.

`fit` finds out which of them works: it compares rows with plain differentiation, each of them once. **Predictions** use
*forward mode* or, where torch has no forward mode for an operation or a wrong one, *rows* as well. With fewer outputs
than samples, rows are the faster way in any case. The report of a fit says which routes it took.

Switches of torch that stand in the way (fused attention, the recurrent layers of oneDNN and cuDNN, reduced precision)
are set while a computation needs it and then put back. The routes are those on a CPU; other devices may take others.

**Inputs** are the arguments of `forward`: a tensor is one argument, a tuple is several, and a dict is passed by
keyword, `model(**x)`. Where `forward` takes one dict, put the dict into a tuple of one: `posterior.predict((x,))`, and
`batch_fn=lambda batch: ((batch["x"],), batch["y"])` for a loader that yields dicts with `x` and `y`.
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
        else:
            msg = f"{name!r} is in REFUSED, but it was not refused."
            raise AssertionError(msg)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(document())
