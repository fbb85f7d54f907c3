"""Run cases and print, for each, the claim, the figures and the ratios; on request, write them as JSON.

For example::

    python -m benchmarks --list
    python -m benchmarks time_to_residual --size full --data FOLDER --device cuda --json result.json
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.frame import FOLDER, Settings, Skipped
from nullbayes.experiments.measuring import environment

FORMAT = 1  # of the JSON; raised when a field changes its meaning
SIZES = ("small", "full")


class UsageError(Exception):
    """The request cannot be met as it is; the message says what to change."""


def case_names() -> list[str]:
    """Return the names of all cases: a case is a file."""
    return sorted(path.stem for path in (FOLDER / "cases").glob("*.py") if not path.stem.startswith("_"))


def load_case(name: str) -> ModuleType:
    """Return the module of a case."""
    if name not in case_names():
        msg = f"There is no case {name!r}: there are {', '.join(case_names())}."
        raise UsageError(msg)
    return importlib.import_module(f"benchmarks.cases.{name}")


def claim_of(case: ModuleType) -> str:
    """Return the claim of a case: the first line of its docstring."""
    return (inspect.getdoc(case) or "").splitlines()[0]


def options_of(case: ModuleType, size: str, device: torch.device, overrides: dict[str, str]) -> dict[str, Any]:
    """Return the options of a case at a size, with those overridden that it has."""
    options = dict(case.SMALL if size == "small" else case.FULL)
    if size == "full" and device.type == "cuda":
        options |= getattr(case, "CUDA", {})
    return options | {name: _parse(name, text, options[name]) for name, text in overrides.items() if name in options}


def _parse(name: str, text: str, like: Any) -> Any:
    """Read an option as what it was: a number, a word, or several separated by commas."""
    try:
        if isinstance(like, tuple):
            return tuple(_parse(name, part, like[0]) for part in text.split(","))
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(like)(text)
    except (KeyError, ValueError) as error:
        msg = f"--set {name}={text}: write it like {name}={_plain(like)}."
        raise UsageError(msg) from error


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_case(
    name: str, *, size: str, device: torch.device, data: Path | None, seed: int, overrides: dict[str, str]
) -> dict[str, Any]:
    """Run one case; what it needs and is not there is said in ``skipped``, warnings are kept beside the figures."""
    case = load_case(name)
    options = options_of(case, size, device, overrides)
    record: dict[str, Any] = {"case": name, "claim": claim_of(case), "size": size, "seed": seed, "options": options}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            record |= {"skipped": None, **case.run(Settings(device, data, seed, options=SimpleNamespace(**options)))}
        except Skipped as reason:
            record["skipped"] = str(reason)
    record["seconds"] = time.perf_counter() - start
    if size == "small" and record["skipped"] is None:
        record["holds"] = None  # claims are about sizes that matter
    record["warnings"] = [f"{w.category.__name__}: {w.message}" for w in caught]
    return record


def execute(
    names: Sequence[str] = (),
    *,
    size: str = "small",
    device: str = "cpu",
    data: str | os.PathLike[str] | None = None,
    seed: int = 0,
    overrides: Sequence[str] = (),
    json_file: str | os.PathLike[str] | None = None,
    listing: bool = False,
) -> dict[str, Any]:
    """Run the named cases, or all of them, print what they found, and return it.

    Parameters
    ----------
    names : sequence of str
        Cases; none means all.
    size : "small" or "full"
        A run of seconds, or figures worth quoting.
    device : str
        "cpu" or "cuda".
    data : path, optional
        The folder with data sets; default ``NULLBAYES_DATA``.
    seed : int
        Of everything random.
    overrides : sequence of str
        ``name=value``, replacing options of the cases that have them.
    json_file : path, optional
        Where to write the results.
    listing : bool
        Only say what cases there are.
    """
    chosen = list(names) or case_names()
    cases = {name: load_case(name) for name in chosen}
    if listing:
        for name, case in cases.items():
            print(f"{name:<20} {claim_of(case)}")
        return {}
    if size not in SIZES:
        msg = f'size must be "small" or "full", not {size!r}.'
        raise UsageError(msg)
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        msg = "PyTorch sees no CUDA device: use --device cpu."
        raise UsageError(msg)
    replaced = _overrides(overrides, {n: options_of(c, size, where, {}) for n, c in cases.items()})
    data = data if data is not None else os.environ.get("NULLBAYES_DATA")
    results: dict[str, Any] = {"format": FORMAT, "environment": environment(where, FOLDER), "cases": []}
    for name in chosen:
        record = run_case(
            name, size=size, device=where, data=Path(data) if data else None, seed=seed, overrides=replaced
        )
        results["cases"].append(record)
        print(describe(record), flush=True)
        if json_file is not None:  # after every case: a later one may take hours
            Path(json_file).write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if size == "small":
        print("\nThe small size shows that the cases run; figures worth quoting need --size full.")
    return results


def _overrides(texts: Sequence[str], options: dict[str, dict[str, Any]]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not any(name in known for known in options.values()):
            every = sorted({key for known in options.values() for key in known})
            msg = f"--set {text}: write NAME=VALUE, with one of {', '.join(every)}."
            raise UsageError(msg)
        found[name] = value
    return found


def describe(record: dict[str, Any]) -> str:
    """Lay out what a case found: claim, figures, ratios, and whether the claim held."""
    head = f"\n{record['case']} ({record['size']}, {record['seconds']:.1f} s)"
    lines = [head, textwrap.fill(f"Claim: {record['claim']}", 100)]
    if record["skipped"] is not None:
        return "\n".join([*lines, f"Skipped: {record['skipped']}"])
    lines += ["", *_table(record["rows"]), ""]
    for title in ("exponents", "ratios"):
        if record.get(title):
            lines += [title, *(f"  {name:<42} {_show(value)}" for name, value in record[title].items())]
    lines += record["notes"]
    kinds = [text.partition(":")[0] for text in record["warnings"]]
    lines += [f"{kind}: {kinds.count(kind)} (--json FILE holds what they say)" for kind in dict.fromkeys(kinds)]
    verdict = {True: ["The claim held in this run."], False: ["The claim did NOT hold in this run."], None: []}
    return "\n".join([*lines, *verdict[record["holds"]]])


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row if any(r.get(name) is not None for r in rows)))
    cells = [columns, *([_show(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which to run; all by default")
    parser.add_argument("--data", help="folder with the data sets; default NULLBAYES_DATA")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the cases")
    parser.add_argument("--json", help="write the results here as well")
    parser.add_argument("--list", action="store_true", help="say what cases there are")
    o = parser.parse_args(arguments)
    try:
        results = execute(
            o.cases, size=o.size, device=o.device, data=o.data, seed=o.seed, overrides=o.set, json_file=o.json,
            listing=o.list,
        )  # fmt: skip
    except UsageError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return int(bool(o.cases) and any(record["skipped"] for record in results.get("cases", [])))
