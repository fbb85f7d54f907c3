"""A source distribution holds every file that its pages refer to, and changes of the pages can be reviewed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDED = [ROOT / name.lstrip("/") for name in SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]]


@pytest.mark.parametrize("path", INCLUDED, ids=lambda path: path.name)
def test_what_is_included_exists(path: Path) -> None:
    assert path.exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_of_the_distribution(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" not in link:
            target = (page.parent / link).resolve()
            assert target.exists(), link
            assert any(target.is_relative_to(path) for path in INCLUDED), f"{link} is not in the source distribution"
    assert any(page.is_relative_to(path) for path in INCLUDED)


@pytest.mark.parametrize("name", ["Makefile", "constraints.txt", "CONTRIBUTING.md"])
def test_the_tools_that_pages_name_are_included(name: str) -> None:
    assert ROOT / name in INCLUDED


@pytest.mark.parametrize(
    "name", ["README.md", "CHANGELOG.md", "examples/README.md", "docs/precision.md", "docs/errata.md"]
)
def test_lines_of_markdown_are_short(name: str) -> None:
    """Rows of tables cannot be broken."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]


def test_installations_are_written_in_one_way() -> None:
    """From an index as nullbayes[...]; README and the quickstart say what that is in a folder with the source."""
    extras, asked = SETTINGS["project"]["optional-dependencies"], []
    for page in [*PAGES, *ROOT.glob("src/nullbayes/**/*.py")]:
        text = page.read_text(encoding="utf-8")
        for name, found in re.findall(r"pip install '(nullbayes|\.)\[([a-z,]+)\]'", text):
            asked += found.split(",")
            assert name == "nullbayes" or page.name in ("README.md", "quickstart.md"), page
    assert set(asked) >= {"demo", "sklearn", "lightning", "transformers", "onnx", "kronecker", "images"}
    assert set(asked) <= set(extras)
    for page in ("README.md", "docs/quickstart.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert ".[demo]" in text
        assert "nullbayes[demo]" in text
