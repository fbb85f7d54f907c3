"""What a case is given, and what it hands back.

A case is a module in ``cases/`` with

- a docstring whose first line is the claim,
- ``SMALL`` and ``FULL``, its options for a run of seconds and for figures worth quoting; where a GPU asks for other
  sizes, ``CUDA`` replaces some of ``FULL``,
- ``run(settings)``, which returns :func:`result`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nullbayes as nb
from nullbayes.experiments import frame as experiments

FOLDER = Path(__file__).resolve().parent


Skipped = experiments.Missing  # what a case needs is not there; the message says what to do about it


@dataclass(frozen=True)
class Settings(experiments.Settings):
    """What a case is given.

    Attributes
    ----------
    options : SimpleNamespace
        The case's own options, at the size asked for and with what was overridden.
    """

    options: SimpleNamespace = field(default_factory=SimpleNamespace)


def result(
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, float | None],
    *,
    holds: bool | None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Pack what a case measured.

    Parameters
    ----------
    rows : sequence of mappings
        A table: plain numbers, strings, booleans and None.
    ratios : mapping
        The figures that the claim is about: both sides measured in this run. None where one side is missing.
    holds : bool or None
        Whether the claim held in this run; None where it could not be judged.
    notes : sequence of str
        What a reader must know to read the figures.
    """
    return {"rows": [dict(row) for row in rows], "ratios": dict(ratios), "holds": holds, "notes": list(notes)}


def in_fresh_process(module: str, function: str, argument: Any) -> Any:
    """Call a function of a benchmark module in a process of its own; argument and answer go as JSON."""
    paths = [str(FOLDER.parent), str(Path(nb.__file__).resolve().parents[1])]
    code = (
        f"import sys; sys.path[:0] = {paths!r}\n"
        f"import json, importlib; module = importlib.import_module({module!r})\n"
        f"print('\\n' + json.dumps(module.{function}(json.loads(sys.stdin.read()))))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=json.dumps(argument), capture_output=True, text=True, check=False
    )
    if done.returncode:
        msg = f"{module}.{function} failed in its own process:\n{done.stderr}"
        raise RuntimeError(msg)
    return json.loads(done.stdout.splitlines()[-1])
