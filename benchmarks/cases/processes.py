"""Processes that share the training data need less work each, and fit the posterior that one process fits.

Wall-clock time, the CPU time of the first process, and what it sends in a sweep, for a fit with rows in blocks. One
thread per process. Wall-clock time means little where there are fewer cores than processes; CPU time then tells how
much of the work was divided. The time to start the processes is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import nullbayes as nb
from benchmarks.frame import FOLDER, Settings, result
from benchmarks.problems import untrained
from nullbayes.experiments.networks import cnn

SMALL = {"n": 40, "width": 4, "samples": 4, "block_rows": 100, "processes": (1,), "parallel": "data"}
FULL = {"n": 400, "width": 16, "samples": 30, "block_rows": 1000, "processes": (1, 2, 4), "parallel": "data"}


def run(settings: Settings) -> dict[str, Any]:
    """Fit with one number of processes after the other."""
    o, rows = settings.options, []
    for processes in o.processes:
        spec = {**vars(o), "repeats": 1, "device": str(settings.device), "seed": settings.seed}
        found = launched(spec, ["--nproc-per-node", str(processes)])
        times = {"seconds": found["seconds"][0], "cpu_seconds": found["cpu_seconds"][0]}
        rows.append({"processes": processes, "cores": os.cpu_count(), **found, **times})
    one, most = rows[0], rows[-1]
    ratios = {
        "CPU time of one process / of each of most": one["cpu_seconds"] / most["cpu_seconds"],
        "difference of lengths": abs(one["length"] - most["length"]) / one["length"],
    }
    holds = (
        None if len(rows) == 1 else most["cpu_seconds"] < one["cpu_seconds"] and ratios["difference of lengths"] < 0.01
    )
    return result(rows, ratios, holds=holds)


def launched(spec: dict[str, Any], torchrun: Sequence[str] | None) -> dict[str, Any]:
    """Measure in processes of their own: those that torchrun starts with these options, or one without torchrun."""
    launcher = [] if torchrun is None else ["-m", "torch.distributed.run", "--standalone", *torchrun]
    command = [sys.executable, *launcher, "-m", "benchmarks.cases.processes", json.dumps(spec)]
    paths = [str(FOLDER.parent), str(Path(nb.__file__).resolve().parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        msg = f"{' '.join(command)} failed:\n{done.stderr}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Fit some times, together with the other processes, if there are any; of several times, the first is left out."""
    o, seconds, cpu_seconds = SimpleNamespace(**spec), list[float](), list[float]()
    group, sent = nb.distributed.init(), [0]
    add_up = nb.distributed.Group.sum

    def counted(self: nb.distributed.Group, tensor: torch.Tensor) -> torch.Tensor:
        sent[0] += tensor.numel() * tensor.element_size() if self.size > 1 else 0
        return add_up(self, tensor)

    settings = Settings(torch.device(o.device), seed=o.seed, options=o)
    problem = untrained(settings, lambda: cnn(o.width), (1, 8, 8), o.n)
    blocks = nb.projectors.Alternating(block_rows=o.block_rows)
    posterior = nb.ProjectedPosterior(problem.model, prior_precision=1e4)
    torch.set_num_threads(1)
    nb.distributed.Group.sum = counted  # type: ignore[method-assign]
    for _ in range(o.repeats + (o.repeats > 1)):
        sent[0] = 0
        group.gather(None)  # the clocks start together
        start, cpu = time.perf_counter(), time.process_time()
        generator = torch.Generator().manual_seed(o.seed)
        posterior.fit(
            problem.loader, n_samples=o.samples, projector=nb.projectors.Krylov(blocks), generator=generator,
            progress=False, parallel=o.parallel,
        )  # fmt: skip
        length = float(posterior.directions.norm())  # waits for a GPU
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    return {
        "seconds": seconds[-o.repeats :],
        "cpu_seconds": cpu_seconds[-o.repeats :],
        "parameters": posterior.report.n_parameters,
        "rows": posterior.report.n_rows,
        "sweeps": posterior.report.sweeps,
        "megabytes_per_sweep": sent[0] / max(1, posterior.report.sweeps) / 1e6,
        "length": length,
    }


if __name__ == "__main__":
    figures = measure(json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))
