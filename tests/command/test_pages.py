"""Commands that pages show can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nullbayes.command import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]


def commands(page: Path) -> list[list[str]]:
    """The words of the commands in shell blocks of a page."""
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```", page.read_text(encoding="utf-8"))
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.partition("&&")[0], comments=True) for line in lines]
    return [found[1:] for found in words if found and found[0] == "nullbayes"]


@pytest.mark.parametrize("page", ["README.md", "docs/command-line.md"])
def test_commands_of_pages_can_be_typed(page: str) -> None:
    found = commands(ROOT / page)
    for words in found:
        assert build_parser().parse_args(words).command == words[0]
    assert {"fit", "check", "predict", "evaluate", "report", "plan", "reproduce"} <= {words[0] for words in found}


def test_the_page_of_the_command_line_names_every_command() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert all(f"| `{command.name}` |" in text for command in COMMANDS)
