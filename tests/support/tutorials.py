"""Run the tutorials of `docs/tutorials`, and write their outputs and pictures: run `make tutorials`.

The ```python blocks of a tutorial run in order in one namespace. What a block prints stands in the ```text block after
it. `python -m support.tutorials lora --set SEED=1` runs one tutorial with another constant and writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.no_torchvision import hide_broken_torchvision

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Run:
    """What a tutorial left behind: its variables, and what each block printed."""

    names: dict[str, Any]
    outputs: tuple[str, ...]


def names() -> list[str]:
    """The tutorials there are."""
    return sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the code of each block, and the output that the page shows after it."""
    return [(match["code"], match["output"] or "") for match in BLOCK.finditer(text)]


def constants(code: str) -> set[str]:
    """The sizes that a first block sets: names in capitals that are assigned a value."""
    return {
        target.id
        for statement in ast.parse(code).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }


def replaced(code: str, values: Mapping[str, object]) -> str:
    """Return a first block with other sizes."""
    for name, value in values.items():
        code, times = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value!r}  ", code, flags=re.MULTILINE)
        if times != 1:
            raise ValueError(f"The first block sets {name} {times} times, and not once.")
    return code


@contextlib.contextmanager
def _place(folder: Path) -> Iterator[None]:
    """Work in a folder, with pictures that need no screen; figures are closed afterwards."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    before = Path.cwd()
    os.chdir(folder)
    try:
        with mpl.rc_context():
            yield
    finally:
        os.chdir(before)
        plt.close("all")


def run(name: str, folder: Path, values: Mapping[str, object] | None = None) -> Run:
    """Run the blocks of a tutorial in a folder, which is where its picture will be."""
    path = FOLDER / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    space: dict[str, Any] = {"__name__": f"tutorial_{name}"}
    outputs = []
    with _place(folder), torch.random.fork_rng(devices=()):
        for i, match in enumerate(BLOCK.finditer(text)):
            code = replaced(match["code"], values or {}) if i == 0 else match["code"]
            lines = text.count("\n", 0, match.start("code"))  # so that a traceback names the line of the page
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * lines + code, str(path), "exec"), space)
            outputs.append(printed.getvalue())
    return Run(space, tuple(outputs))


def differences(shown: str, printed: str) -> list[str]:
    """Say where two outputs differ: words must be the same, numbers nearly so.

    Another processor rounds differently, and training makes more of it: a flagged input more or less is no difference.
    """
    found = []
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return [f"the page shows\n{shown}and the block prints\n{printed}"]
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        one, other = (float(number.replace(",", "")) for number in (a, b))
        least = 0.03 if "." in a else 3  # a share, or a count
        if abs(one - other) > least + 0.15 * max(abs(one), abs(other)):
            found.append(f"the page shows {a}, and the block prints {b}")
    return found


def written(text: str, outputs: tuple[str, ...]) -> str:
    """Return a page with other outputs."""
    left = iter(outputs)

    def block(match: re.Match[str]) -> str:
        output = next(left)
        shown = f"\n```text\n{output.rstrip()}\n```\n" if output.strip() else ""
        return f"```python\n{match['code']}```\n{shown}"

    return BLOCK.sub(block, text)


def main() -> None:
    """Run tutorials; without constants of one's own, write what they print and draw into their pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=names(), metavar="NAME")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other sizes; nothing is written")
    parser.add_argument("--keep", metavar="FOLDER", help="where the pictures go then")
    arguments = parser.parse_args()
    values = {name: ast.literal_eval(value) for name, value in (item.split("=") for item in arguments.set)}
    torch.set_num_threads(1)  # as in the tests, so that they see the same numbers
    hide_broken_torchvision()
    for name in arguments.names:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = run(name, Path(folder), values)
            except Exception:
                traceback.print_exc()
                raise SystemExit(f"{name} failed") from None
            if values:
                print(*found.outputs, sep="\n")
            else:
                page = FOLDER / f"{name}.md"
                page.write_text(written(page.read_text(encoding="utf-8"), found.outputs), encoding="utf-8")
            if not values or arguments.keep:
                shutil.copy(Path(folder) / f"{name}.png", arguments.keep or FOLDER)
        print(f"{name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
