"""Write the table of imports in `docs/architecture.md` from the one that the tests enforce: run `make docs`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from test_architecture import ALLOWED, PACKAGE, ROOT

FILE = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: written by `make docs` -->", "<!-- imports end -->"


def purpose(package: str) -> str:
    """The first paragraph of the docstring of a package or module, without its formulas."""
    path = PACKAGE / package if package != ROOT else PACKAGE
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split("\n")
    text = re.sub(r"\s*:math:`[^`]*`", "", " ".join(line.strip() for line in lines))
    return text.replace("``", "`").replace("|", "\\|").rstrip(".")


def table() -> str:
    """The packages from the lowest to the highest, what each is for, and what it may import."""
    lines = ["| package | purpose | may import |", "|---|---|---|"]
    for package, allowed in ALLOWED.items():
        names = ", ".join(f"`{name}`" for name in sorted(allowed)) or "nothing of ours"
        lines.append(f"| `{package}` | {purpose(package)} | {names} |")
    return "\n".join(lines)


def document() -> str:
    """The page with a new table."""
    text = FILE.read_text(encoding="utf-8")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{table()}\n\n{text[text.index(END) :]}"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
