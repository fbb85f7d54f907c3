"""Importing the library takes at most a fifth longer than importing torch.

Each is imported in fresh processes, in turns; the times are those of the processes, whatever else the machine does.
Both have their bytecode on disk, as an installed package has: the first process writes it. At the small size two
modules of Python stand in for them.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import nullbayes as nb
from benchmarks.frame import Settings, result

SMALL = {"base": "json", "ours": "fractions", "repeats": 1}
FULL = {"base": "torch", "ours": "nullbayes", "repeats": 15}
TIMES = 1.2  # what the claim promises


def run(settings: Settings) -> dict[str, Any]:
    """Time both imports."""
    o = settings.options
    seconds: dict[str, list[float]] = {o.base: [], o.ours: []}
    for name in (*seconds, *o.repeats * tuple(seconds)):  # the first one of each fills the caches
        seconds[name].append(_import(name))
    rows = [
        {"module": name, "median": statistics.median(times[1:]), "least": min(times[1:])}
        for name, times in seconds.items()
    ]
    base, ours = rows
    ratios = {what: ours[what] / base[what] for what in ("median", "least")}
    return result(rows, ratios, holds=ratios["median"] <= TIMES if o.base == "torch" else None)


def _import(name: str) -> float:
    """Return the seconds of a process that imports a module."""
    path = os.pathsep.join([str(Path(nb.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    before = _of_children()
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True, env=variables)
    return _of_children() - before


def _of_children() -> float:
    """Return the CPU seconds of all processes that have ended, to the microsecond: `os.times` counts in hundredths."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
