"""Shells complete commands, options and their values."""

from __future__ import annotations

import argparse
import shutil
import subprocess

import pytest

from nullbayes.command import COMMANDS, build_parser, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def spellings() -> dict[str, list[str]]:
    """The options of each command, as its help names them."""
    (subs,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: [s for a in sub._actions for s in a.option_strings] for name, sub in subs.choices.items()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("nullbayes ''", [*(command.name for command in COMMANDS), "--help", "--version"]),
        ("nullbayes pre", ["predict"]),
        ("nullbayes fit --mem", ["--memory-limit"]),
        ("nullbayes fit --posterior ''", ["projected", "loss-projected"]),
        ("nullbayes fit --posterior l", ["loss-projected"]),
        ("nullbayes reproduce fash", ["fashion-mnist"]),
        ("nullbayes completion z", ["zsh"]),
        ("nullbayes check --posterior x", []),
    ],
)
def test_bash_completes(words: str, found: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    line = f'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _nullbayes; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{text}\n{line}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == found
    assert not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = script(shell, capsys).splitlines()
    for command, options in spellings().items():
        about = [line for line in lines if f"from {command}'" in line or line.lstrip().startswith(f"{command}) ")]
        for option in options:
            written = f"'{option}[" if shell == "zsh" else f" -{'l' if option[1] == '-' else 's'} {option.lstrip('-')} "
            assert any(written in line for line in about), (command, option)
    assert any("loss-projected" in line for line in lines)
    assert any("fashion-mnist" in line for line in lines)


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_scripts_of_other_shells_are_well_formed(
    shell: str, check: str, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    text = script(shell, capsys)
    subprocess.run([shell, check, "/dev/stdin"], input=text, text=True, check=True)
