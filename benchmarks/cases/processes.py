"""Processes that share the training data need less work each, and fit the posterior that one process fits.

Wall-clock time, the CPU time of the first process, and what it exchanges, for a fit with rows in blocks, of several
fits the fastest. One thread per process. Wall-clock time means little where there are fewer cores than processes; CPU
time then tells how much of the work was divided. The time to start the processes is not counted.

``python -m benchmarks.scaling`` reads the figures. Its constants for exchanges come from here as well: the time of a
handshake, of a sum of one number and of a large one, and how many bytes the machine moved for each byte of the sum.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import nullbayes as nb
from benchmarks.frame import FOLDER, Settings, result
from benchmarks.problems import Problem, untrained
from nullbayes.experiments.networks import cnn

SMALL = {
    "n": 40, "width": 4, "samples": 4, "block_rows": 100, "processes": (1,), "parallel": ("data",), "repeats": 1,
}  # fmt: skip
FULL = {
    "n": 400, "width": 16, "samples": 30, "block_rows": 1000, "processes": (1, 2, 4), "parallel": ("data", "samples"),
    "repeats": 3,
}  # fmt: skip

_LARGE = 2_000_000  # numbers of a sum that is timed
TOGETHER = 16  # samples that a process projects in one go with parallel="samples"


def run(settings: Settings) -> dict[str, Any]:
    """Fit with one number of processes after the other."""
    o, rows = settings.options, []
    for parallel in o.parallel:
        for processes in o.processes:
            spec = {**vars(o), "parallel": parallel, "device": str(settings.device), "seed": settings.seed}
            found = launched(spec, ["--nproc-per-node", str(processes)])
            fastest = min(range(o.repeats), key=found["seconds"].__getitem__)
            times = {name: found[name][fastest] for name in ("seconds", "cpu_seconds")} | found.pop("phases")[fastest]
            sizes = {"cores": os.cpu_count(), "samples": o.samples, "block_rows": o.block_rows}
            rows.append({"parallel": parallel, "processes": processes, **sizes, **found, **times})
    shared = [row for row in rows if row["parallel"] == o.parallel[0]]
    one, most = shared[0], shared[-1]
    ratios = {
        "CPU time of one process / of each of most": one["cpu_seconds"] / most["cpu_seconds"],
        "difference of lengths": abs(one["length"] - most["length"]) / one["length"],
    }
    holds = None if one is most else most["cpu_seconds"] < one["cpu_seconds"] and ratios["difference of lengths"] < 0.01
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
    group, phases, peaks = nb.distributed.init(), list[dict[str, float]](), list[int | None]()
    settings = Settings(torch.device(o.device), seed=o.seed, options=o)
    problem = untrained(settings, lambda: cnn(o.width), (1, 8, 8), o.n)
    blocks = nb.projectors.Alternating(block_rows=o.block_rows)
    posterior = nb.ProjectedPosterior(problem.model, prior_precision=1e4)
    torch.set_num_threads(1)
    for _ in range(o.repeats + (o.repeats > 1)):
        group.gather(None)  # the clocks start together
        start, cpu = time.perf_counter(), time.process_time()
        generator = torch.Generator().manual_seed(o.seed)
        with counting() as counted:
            posterior.fit(
                problem.loader, n_samples=o.samples, projector=nb.projectors.Krylov(blocks), generator=generator,
                progress=False, parallel=o.parallel,
            )  # fmt: skip
        length = float(posterior.directions.norm())  # waits for a GPU
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
        phases.append({f"{name}_seconds": value for name, value in posterior.report.seconds.items()})
        peaks.append(posterior.report.peak_memory)
    report = posterior.report
    together = TOGETHER if o.parallel == "samples" else o.samples
    parts = [report.sweeps_per_sample[i : i + together] for i in range(0, o.samples, together)]
    return {
        "seconds": seconds[-o.repeats :],
        "cpu_seconds": cpu_seconds[-o.repeats :],
        "phases": phases[-o.repeats :],
        "parameters": report.n_parameters,
        "rows": report.n_rows,
        "sweeps": report.sweeps,
        "sample_sweeps": sum(report.sweeps_per_sample),
        "part_sweeps": sum(map(max, parts)),
        "exchanges": counted["exchanges"],
        "large_sums": counted["large_sums"],
        "megabytes": counted["bytes"] / 1e6,
        "megabytes_per_sweep": counted["bytes"] / max(1, report.sweeps) / 1e6,
        "held_megabytes": held_bytes(problem) / 1e6,
        "peak_megabytes": None if peaks[0] is None else peaks[0] / 1e6,
        **exchange_times(group, settings.device),
        "length": length,
    }


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what this process exchanges: how often, and the bytes of the tensors that it passes on."""
    counted, group = Counter[str](), nb.distributed.Group
    kept = {name: getattr(group, name) for name in ("sum", "join", "broadcast", "gather")}

    def counter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: nb.distributed.Group, value: Any, *others: Any, **named: Any) -> Any:
            if self.size > 1:
                counted["exchanges"] += 1
                counted["bytes"] += value.nbytes if torch.is_tensor(value) else 0
                counted["large_sums"] += name == "sum" and value.ndim == 2
            return call(self, value, *others, **named)

        return method

    for name, call in kept.items():
        setattr(group, name, counter(name, call))
    try:
        yield counted
    finally:
        for name, call in kept.items():
            setattr(group, name, call)


def held_bytes(problem: Problem) -> int:
    """Return the bytes of the rows of all processes where they are held."""
    return nb.OutputJacobian(problem.model, problem.loader).costs().held_bytes


def exchange_times(group: nb.distributed.Group, device: torch.device, repeats: int = 20) -> dict[str, float | None]:
    """Return the milliseconds of a handshake, of a sum of one number and of a large sum, each the fastest of some.

    The bytes that moved are what the network interface of a machine by itself has counted, for each byte of the sum and
    each process.
    """

    def handshake() -> None:
        with group.together():
            pass

    def fastest(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e3 * min(times)

    one, large = torch.zeros(1, device=device), torch.zeros(_LARGE, device=device)
    times = {"handshake_ms": fastest(handshake), "sum_ms": fastest(lambda: group.sum(one))}
    before = _loopback_bytes()
    times["large_sum_ms"] = fastest(lambda: group.sum(large))
    after, moved = _loopback_bytes(), repeats * large.nbytes * group.size
    return {**times, "large_bytes": large.nbytes, "moved": None if after is None else (after - (before or 0)) / moved}


def _loopback_bytes() -> int | None:
    """Return the bytes that this machine has sent to itself, where the system tells."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/net/dev").read_text().splitlines()
        return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])
    return None


if __name__ == "__main__":
    figures = measure(json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))
