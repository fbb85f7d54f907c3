"""The command ``nullbayes``: fit, check, predict, evaluate and report for a model of your own; reproduce the paper."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import nullbayes as nb
from nullbayes.command import check, completion, demo, evaluate, fit, plan, predict, report, reproduce
from nullbayes.command.frame import Console, Parser, Refusal, misused
from nullbayes.command.names import first_line, typed
from nullbayes.command.options import common

COMMANDS = (
    fit.COMMAND, check.COMMAND, predict.COMMAND, evaluate.COMMAND, report.COMMAND, plan.COMMAND, reproduce.COMMAND,
    demo.COMMAND, completion.COMMAND,
)  # fmt: skip
_INTERRUPTED, _BROKEN_PIPE = 130, 141  # as shells report both
_ABOUT = """\
Know when not to trust a trained network, without paying for it in accuracy.

A model and data of your own are named as package.module:name or file.py:name, from the current folder or from what is
installed: a function without arguments that returns them, or the thing itself. `nullbayes COMMAND --help` has an
example of each command."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="nullbayes", description=_ABOUT, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"nullbayes {nb.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        example = f"example:\n  {command.example}"
        sub = commands.add_parser(
            command.name, help=command.about, description=command.description, epilog=example, formatter_class=_Form
        )
        command.arguments(sub)
        common(sub)
        sub.set_defaults(run=command.run)
    return parser


class _Form(argparse.RawDescriptionHelpFormatter):
    """Help that fills the description and leaves the example as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = argparse.HelpFormatter._fill_text(self, text, width, indent)
        return text if text.startswith("example:") else filled


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, with the arguments of the process by default, and return its exit code.

    It is 0, 1 for a failure or a promise that does not hold, 2 for a command that was not typed right, and 130 after
    Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        with _one_line_warnings(), _interruption() as signals:
            options = build_parser().parse_args(words)
            _check_alone(options.command)
            code: int = options.run(options, Console(options.json, signals))
            sys.stdout.flush()  # here, where a pipe without a reader is dealt with
        return code
    except SystemExit as end:  # of --help and --version
        return int(end.code or 0)
    except KeyboardInterrupt:
        Console().say("nullbayes: interrupted.")
        return _INTERRUPTED
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is still to be written goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Refusal as refusal:
        if debug:
            raise
        return _refused(refusal, refusal.code)
    except Exception as error:
        if debug:
            raise
        return _refused(error, 1)


def _check_alone(command: str) -> None:
    """Refuse a command that several processes would each run as a whole."""
    if command != "fit" and (n := os.environ.get("WORLD_SIZE", "1")) != "1":
        msg = f"nullbayes {command} is run by one process, and there are {n} (WORLD_SIZE): start it without torchrun."
        raise misused(msg)


def _refused(error: Exception, code: int) -> int:
    """Say in one line what went wrong."""
    text = first_line(error)
    if isinstance(error, nb.errors.NullBayesError):
        text = typed(text)
    elif not (isinstance(error, OSError) or type(error).__module__.startswith("nullbayes.")):  # no message of ours
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    if isinstance(error, nb.errors.ProcessLostError):  # perhaps the first process, which speaks for all others
        print(f"nullbayes: {text}", file=sys.stderr, flush=True)
    else:
        Console().say(f"nullbayes: {text}")
    return code


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print each warning in one line on stderr."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        Console().say(f"warning: {typed(' '.join(str(message).split()))}")

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=nb.errors.NullBayesWarning)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _interruption() -> Iterator[list[int]]:
    """Note Ctrl-C, which a fit survives with the samples that it has; its command asks for it."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
