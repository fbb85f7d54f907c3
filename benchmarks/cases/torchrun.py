"""One process that torchrun starts fits as fast as plain `fit` does: within 3 %.

Processes with and without torchrun are started in turns. Each fits several times, after a first fit that does not
count. Compared are the fastest fits, which other programs on the machine disturb least, and the medians.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cases.processes import launched
from benchmarks.frame import Settings, result

SMALL = {"n": 40, "width": 4, "samples": 4, "block_rows": 100, "rounds": 1, "repeats": 1}
FULL = {"n": 400, "width": 16, "samples": 30, "block_rows": 1000, "rounds": 3, "repeats": 3}
CUDA = {"n": 2000, "width": 32, "block_rows": 2000, "repeats": 5}

PLAIN, TORCHRUN = "plain fit", 'torchrun, fit(parallel="data")'


def run(settings: Settings) -> dict[str, Any]:
    """Fit without and with torchrun, in turns."""
    o, times = settings.options, {PLAIN: list[float](), TORCHRUN: list[float]()}
    rows, spec = [], {**vars(o), "device": str(settings.device), "seed": settings.seed}
    for _ in range(o.rounds):
        for name in times:
            plain = name == PLAIN
            found = launched(
                {**spec, "parallel": None if plain else "data"}, None if plain else ["--nproc-per-node", "1"]
            )
            times[name] += found["seconds"]
    for name, seconds in times.items():
        each = {"fits": len(seconds), "fastest_seconds": min(seconds), "median_seconds": statistics.median(seconds)}
        rows.append({"started_by": name, **each, "rows": found["rows"], "parameters": found["parameters"]})
    ratios = {
        f"torchrun / plain, {which.split('_')[0]} fit": rows[1][which] / rows[0][which]
        for which in ("fastest_seconds", "median_seconds")
    }
    return result(rows, ratios, holds=ratios["torchrun / plain, fastest fit"] < 1.03)
