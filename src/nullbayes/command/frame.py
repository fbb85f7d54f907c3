"""What a command is, how it speaks, and how it refuses: results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

_WIDTH = 100  # of what people read


class Refusal(Exception):
    """A command cannot go on; the message says why and what to type instead.

    Attributes
    ----------
    code : int
        Of the process: 2 if the command was not typed right, 1 if it failed.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def misused(message: str) -> Refusal:
    """Return the refusal of a command that was not typed right."""
    return Refusal(message, 2)


def is_first() -> bool:
    """Whether this is the first of the processes that torchrun has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Console:
    """Where a command speaks.

    Attributes
    ----------
    json : bool
        Whether results are printed for programs.
    signals : list of int
        What Ctrl-C has left here. A fit survives it, with the samples that it has.
    """

    json: bool = False
    signals: list[int] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Whether somebody typed Ctrl-C."""
        return bool(self.signals)

    def say(self, text: str) -> None:
        """Print a line for a person, on stderr; of several processes, the first speaks."""
        if is_first():
            print(text, file=sys.stderr, flush=True)

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """Print a result on stdout, as text or as JSON; of several processes, the first does."""
        if is_first():
            print(json.dumps(plain(data), indent=2, allow_nan=False) if self.json else text, flush=True)


def folded(text: str, indent: int) -> str:
    """Return lines of a table with names on the left, cut to the width of a page; ``indent`` is where values begin."""
    lines = (textwrap.wrap(line, _WIDTH, subsequent_indent=" " * indent) or [""] for line in text.splitlines())
    return "\n".join(part for parts in lines for part in parts)


def plain(value: Any) -> Any:
    """Return a value as JSON holds it; numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value if isinstance(value, (str, int, type(None))) else str(value)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes
    ----------
    name, about : str
        What is typed, and what it does in a few words.
    description : str
        The same in two sentences.
    example : str
        Lines that can be typed.
    arguments : callable
        Adds its arguments to a parser.
    run : callable
        Does the work, and returns the exit code.
    """

    name: str
    about: str
    description: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], int]


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what was wrong, and where to read more."""
        text = message[:1].upper() + message[1:].rstrip(".")
        raise misused(f"{text}. {self.prog} --help says what there is.")


def writable(path: Path, what: str) -> Path:
    """Return a path that can be written to, or refuse it before any work is done."""
    folder = path.absolute().parent
    if not folder.is_dir():
        msg = f"There is no folder {folder} for {what}: make it, or choose another with -o."
        raise misused(msg)
    if path.is_dir():
        msg = f"{path} is a folder: name a file for {what} with -o."
        raise misused(msg)
    return path


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file beside its place, then put it there in one move."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part{path.suffix}")
    try:
        save(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
