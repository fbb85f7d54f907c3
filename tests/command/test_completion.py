"""Shells complete commands, options and their values."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import subprocess
from pathlib import Path

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


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("nullbayes ", sorted(command.name for command in COMMANDS)),
        ("nullbayes fit --mem", ["--memory-limit"]),
        ("nullbayes fit --posterior ", ["loss-projected", "projected"]),
        ("nullbayes reproduce fash", ["fashion-mnist"]),
        ("nullbayes predict posterior.s", ["posterior.safetensors"]),
    ],
)
def test_fish_completes(words: str, found: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "posterior.safetensors").touch()
    asked = f"{script('fish', capsys)}\ncomplete -C '{words}'"
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True, cwd=tmp_path, env=home)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == found


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("nullbayes pre", "nullbayes predict "),
        ("nullbayes fit --mem", "--memory-limit "),
        ("nullbayes fit --posterior l", "--posterior loss-projected "),
        ("nullbayes reproduce fash", "fashion-mnist "),
        ("nullbayes predict posterior.s", "predict posterior.safetensors "),
        ("nullbayes ", "run an experiment of the paper"),
    ],
)
def test_zsh_completes_on_a_terminal(
    typed: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "posterior.safetensors").touch()
    (tmp_path / ".zshrc").write_text(f"autoload -Uz compinit; compinit -u -D\n{script('zsh', capsys)}\nPROMPT=READY\n")
    ours, theirs = os.openpty()
    home = {**os.environ, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    shell = subprocess.Popen(["zsh", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=home)
    try:
        read_until(ours, "READY")
        os.write(ours, f"{typed}\t".encode())
        read_until(ours, shown)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, text: str) -> None:
    """Read what a shell shows, until some text is there."""
    found = ""
    while text not in found:
        if not select.select([terminal], [], [], 20)[0]:
            pytest.fail(f"{text!r} is not in {found!r}")
        found += os.read(terminal, 65536).decode(errors="replace")


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
