"""Predict time, exchanged bytes and memory of a fit on many processes, from constants that one run has measured.

    python -m benchmarks processes --size full --json results/processes.json
    python -m benchmarks.scaling results/processes.json --write docs/many-machines.md

``simulator.py`` has the model. Its constants of computing come from the fits of one process, and those of exchanges
from two processes. The page compares the model with all fits that were measured, and has estimates for sizes that
nobody has measured. Without ``--write``, the tables are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.simulator import (
    NUMBER,
    Estimate,
    Machine,
    Problem,
    applications,
    checks,
    fastest,
    limit,
    mesh,
    sent_bytes,
    simulate,
)

BEGIN, END = "<!-- scaling begin: written by `python -m benchmarks.scaling --write` -->", "<!-- scaling end -->"
Row = Mapping[str, Any]


# --- constants --------------------------------------------------------------------------------------------------------

# One H200. `python -m benchmarks.rates --device cuda` measures the rates of products (5.1e13 operations of float32 per
# second, 6.2e13 of float64) and of memory (4.2e12 bytes). `constants` says what the others are taken from.
H200 = Machine(
    form=3 * NUMBER / 4.2e12,
    read=2 * NUMBER / 4.2e12,
    multiply=1.2 * 4 / 5.1e13,
    factor=1 / 6.2e13,
    network=1 / (0.4 * 5.1e13),
    handshake=1e-4,
    latency=3e-5,
    bandwidth=3e11,
    between=4e10,
    node=8,
    memory=141e9,
)

# Liu et al. (2021) count 4.5e9 multiplications and additions for an image; the backward pass takes twice as many. For
# the other, 6 operations per parameter and token, with sequences of 512 tokens.
SWIN = Problem(rows=1_281_167, parameters=28_288_354, network_flops=3 * 2 * 4.5e9)
BILLION = Problem(rows=100_000, parameters=10**9, network_flops=6 * 1e9 * 512)


def problem_of(row: Row) -> Problem:
    """Return what was fitted in a measured run."""
    return Problem(
        rows=row["rows"],
        parameters=row["parameters"],
        samples=row["samples"],
        block_rows=row["block_rows"],
        sweeps=row["sweeps"],
        sample_sweeps=row["sample_sweeps"],
        part_sweeps=row["part_sweeps"],
        held_bytes=round(1e6 * row["held_megabytes"]),
    )


def fitted(runs: Sequence[Row]) -> Machine:
    """Return the constants that measured runs of one process, and exchanges between two, let conclude."""
    one, alone, two = _run(runs, "data", 1), _run(runs, "samples", 1), [row for row in runs if row["processes"] == 2]
    unit = Machine(form=1, read=1, multiply=0, factor=1, handshake=0, latency=0, bandwidth=1)
    seconds = {
        name: [row[f"{name}_seconds"] * row["cpu_seconds"] / row["seconds"] for row in (one, alone)]
        for name in ("rows", "factors", "projection")
    }
    # two equations: all samples at once; and in parts, for which the rows are read more often
    reads = [simulate(problem_of(row), unit, row["parallel"], 1).multiplying for row in (one, alone)]
    products = simulate(problem_of(one), replace(unit, read=0, multiply=1), "data", 1).multiplying
    read = (seconds["projection"][1] - seconds["projection"][0]) / (reads[1] - reads[0])
    first = simulate(problem_of(one), unit, "data", 1)
    handshake, small, large = (
        1e-3 * min(row[name] for row in two) for name in ("handshake_ms", "sum_ms", "large_sum_ms")
    )
    shared = _run(runs, "data", 2)
    machine = Machine(
        cores=one["cores"],
        fixed=one["cpu_seconds"] - sum(each[0] for each in seconds.values()),
        form=seconds["rows"][0] / first.forming,
        read=read,
        multiply=(seconds["projection"][0] - read * reads[0]) / products,
        factor=seconds["factors"][0] / first.factoring,
        handshake=handshake,
        latency=small - handshake,
        bandwidth=sent_bytes(one["large_bytes"], 2) / (large - small),
        beside=shared["exchanges"] - applications(shared["sweeps"]) - checks(shared["sweeps"]),
        temporary=1e6 * one["peak_megabytes"] - first.memory,
    )
    negative = [name for name, value in vars(machine).items() if value is not None and value < 0]
    if negative:
        msg = (
            f"The constants {', '.join(negative)} come out negative: other programs disturbed the run. Repeat it, with "
            "more fits (--set repeats=5)."
        )
        raise SystemExit(msg)
    return machine


def _run(runs: Iterable[Row], parallel: str, processes: int) -> Row:
    for row in runs:
        if (row["parallel"], row["processes"]) == (parallel, processes):
            return row
    msg = f'There is no run with parallel="{parallel}" and {processes} processes: run python -m benchmarks processes.'
    raise SystemExit(msg)


def efficiency(cpu_seconds_of_one: float, cpu_seconds: float, processes: int) -> float:
    """Return the CPU time of one process over that of all: the speed-up per core, if no other program runs."""
    return cpu_seconds_of_one / (processes * cpu_seconds)


# --- the page ---------------------------------------------------------------------------------------------------------


_CONSTANTS = (
    "The constants, those of one core from the runs with one process, and those of exchanges from two processes:"
)
_TIMES = "Seconds of the runs. The model's are those of a machine on which no other program runs:"
_SIZES = "Bytes of the runs; what is sent was counted by the network interface of the machine:"
_ESTIMATES = "Estimates for several H200, eight per machine; hours, and what most of them are spent on:"


def document(runs: Sequence[Row]) -> str:
    """Return the tables of the page."""
    machine = fitted(runs)
    swin, billion = (limit(problem, H200, 8) for problem in (SWIN, replace(BILLION, samples=2)))
    last = (
        f"Twice as many GPUs gain less than a factor of 1.4 from {swin:,} on for Swin-T, and from {billion:,} on for\n"
        "two samples of the other network."
    )
    times, sizes = compared(runs, machine)
    return "\n\n".join([_CONSTANTS, constants(machine), _TIMES, times, _SIZES, sizes, _ESTIMATES, estimates(), last])


def constants(machine: Machine) -> str:
    """Return the constants of the machine that was measured, and of the GPU, side by side, with their source."""
    lines = []
    for name, attribute, scale, unit, source in (
        ("form an entry of a row", "form", 1e9, "ns", "measured rate of memory, three times 4 bytes"),
        ("operation of the network", "network", 1e12, "ps", "0.4 of the measured rate of products, a guess"),
        ("operation of Gram matrices and factors", "factor", 1e12, "ps", "measured, in float64"),
        ("read an entry in a sweep", "read", 1e9, "ns", "measured rate of memory, twice 4 bytes"),
        ("multiply an entry, there and back, per sample", "multiply", 1e12, "ps", "measured rate, 4.8 operations"),
        ("handshake between two", "handshake", 1e3, "ms", "a guess"),
        ("latency of a sum", "latency", 1e3, "ms", "a guess"),
        ("sent to the next process", "bandwidth", 1e-9, "GB/s", "two thirds of NVLink's 450"),
        ("sent to another machine", "between", 1e-9, "GB/s", "0.8 of 400 Gbit/s"),
        ("memory", "memory", 1e-9, "GB", "its data sheet"),
        ("memory beside rows, factors and vectors", "temporary", 1e-6, "MB", ""),
        ("once per fit", "fixed", 1.0, "s", ""),
    ):
        each = [scale * getattr(one, attribute) for one in (machine, H200)]
        shown = [f"{value:.3g} {unit}" if 0 < value < math.inf else "" for value in each]
        lines.append([name, *shown, source])
    return _markdown(["constant", "one core, measured", "H200", "the H200's is"], lines)


def compared(runs: Sequence[Row], machine: Machine) -> tuple[str, str]:
    """Return the measured runs, and beside each figure what the model says: times; and bytes."""
    keys = ["`parallel`", "processes"]
    times = [*keys, "CPU seconds of each", "model", "seconds", "model", "efficiency", "model"]
    sizes = [*keys, "MB passed on per sweep", "model", "bytes sent per byte of a sum", "model", "MB of memory", "model"]
    timed, sized = [], []
    for row in runs:
        parallel, n = row["parallel"], row["processes"]
        one, own = _run(runs, parallel, 1), simulate(problem_of(row), machine, parallel, n)
        first = simulate(problem_of(one), machine, parallel, 1)
        name = [f'`"{parallel}"`', str(n)]
        figures = [row["cpu_seconds"], own.cpu_seconds, row["seconds"], own.seconds]
        figures.append(efficiency(one["cpu_seconds"], row["cpu_seconds"], n))
        figures.append(efficiency(first.cpu_seconds, own.cpu_seconds, n))
        timed.append([*name, *(f"{value:.2f}" for value in figures)])
        if n > 1:
            passed = [value / row["sweeps"] for value in (row["megabytes"], own.passed_bytes / 1e6)]
            moved = ["" if row["moved"] is None else f"{row['moved']:.2f}", f"{sent_bytes(1, n):.2f}"]
            memory = [row["peak_megabytes"], own.memory / 1e6]
            sized.append([*name, *(f"{value:.2f}" for value in passed), *moved, *(f"{value:.0f}" for value in memory)])
    return _markdown(times, timed), _markdown(sizes, sized)


def estimates() -> str:
    """Return what nobody has measured."""
    head = ["network, samples", "GPUs, and what they share", "rows per block", "sweeps", "hours", "to form rows"]
    head += ["to multiply", "to exchange", "GB sent per sweep", "GB of memory, at least"]
    swin, billion, few = "Swin-T, 30", "10⁹ parameters, 30", "10⁹ parameters, 2"
    lines = [
        _line(swin, "1", fastest(SWIN, H200, "data", 1)),
        _line(swin, "8, data", fastest(SWIN, H200, "data", 8)),
        _line(swin, "64, data", fastest(SWIN, H200, "data", 64)),
        _line(swin, "512, data", fastest(SWIN, H200, "data", 512)),
        _line(swin, "4096, data", fastest(SWIN, H200, "data", 4096)),
        _line(swin, "8, samples", fastest(SWIN, H200, "samples", 8)),
        _line(swin, "64: 32 data by 2 samples, not offered", mesh(SWIN, H200, 32, 2)),
        _line(billion, "64, data", fastest(BILLION, H200, "data", 64)),
        *(_line(few, f"{n}, data", fastest(replace(BILLION, samples=2), H200, "data", n)) for n in (8, 64, 512)),
    ]
    return _markdown(head, lines)


def _line(name: str, shared: str, found: Estimate) -> list[str]:
    memory = f"{found.memory / 1e9:,.0f}"
    if not found.fits:
        return [name, shared, "", "", "does not fit", "", "", "", "", memory]
    hours = [value / 3600 for value in (found.seconds, found.forming, found.multiplying, found.exchanging)]
    sent = f"{found.sent_bytes / found.sweeps / 1e9:.2g}"
    return [name, shared, f"{found.block_rows:,}", str(found.sweeps), *map(_hours, hours), sent, memory]


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def written(page: str, text: str) -> str:
    """Return a page with the text between its marks."""
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of a file that the case ``processes`` has written, or write them to a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="what python -m benchmarks processes --json has written")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables to this page, between its marks")
    o = parser.parse_args(arguments)
    text = document(measured(json.loads(o.file.read_text(encoding="utf-8"))))
    if o.write is None:
        print(text)
        return 0
    page = o.write.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        msg = f"{o.write} has no place for the tables: write the lines {BEGIN} and {END} in it."
        raise SystemExit(msg)
    o.write.write_text(written(page, text), encoding="utf-8")
    return 0


def measured(results: Mapping[str, Any]) -> list[Row]:
    """Return the runs of the case ``processes`` in a file."""
    return [row for case in results["cases"] if case["case"] == "processes" for row in case["rows"]]


if __name__ == "__main__":
    sys.exit(main())
