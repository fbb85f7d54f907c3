"""``nullbayes predict``: predictions, scores and decisions for a user's inputs, as a table or as arrays."""

from __future__ import annotations

import argparse
import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, Refusal, misused, writable, write

if TYPE_CHECKING:
    from nullbayes.command.answers import Answers


def _arguments(parser: argparse.ArgumentParser) -> None:
    shared.posterior(parser)
    shared.data(parser, "the inputs, whose targets are skipped if there are any")
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="false-alarm rate of the decisions (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="scores.csv, scores.npz or scores.parquet"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Predict for all inputs, and write a table."""
    save = _writer(writable(options.output, "the table"))
    from nullbayes.command.answers import ask_all
    from nullbayes.command.data import read_data

    posterior = shared.the_posterior(options.posterior, shared.the_model(options, console), options)
    data = read_data(options.data, "--data", console)
    answers = ask_all(posterior, data, options.alpha)
    write(options.output, lambda path: save(path, answers))
    n, columns = len(answers.arrays["score"]), list(answers.columns())
    flagged = int(answers.arrays["strange"].sum()) if "strange" in answers.arrays else None
    told = f"{n:,} inputs are in {options.output}."
    if flagged is None:
        console.say("The posterior is not calibrated: there are no p-values and decisions; fit with --held-out.")
    else:
        told += f" {flagged:,} {'is' if flagged == 1 else 'are'} strange, at a false-alarm rate of {options.alpha:g}."
    if "mean" not in columns and "mean_0" not in columns and options.output.suffix != ".npz":
        console.say("Outputs have positions: the table has one score per input; an .npz file holds all outputs.")
    console.result(told, {"output": str(options.output), "n": n, "flagged": flagged, "columns": columns})
    return 0


def _writer(path: Path) -> Callable[[Path, Answers], None]:
    """Return what writes a file of that suffix, or refuse it before any work is done."""
    writers = {".csv": _write_csv, ".npz": _write_arrays, ".parquet": _write_parquet}
    if path.suffix not in writers:
        msg = f"-o {path}: its suffix says the format, which is one of {', '.join(writers)}."
        raise misused(msg)
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        msg = "A .parquet file needs pyarrow: pip install pyarrow, or write a .csv or .npz file."
        raise Refusal(msg)
    return writers[path.suffix]


def _write_csv(path: Path, answers: Answers) -> None:
    columns = {name: _cells(array.tolist()) for name, array in answers.columns().items()}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["input", *columns])
        writer.writerows([i, *row] for i, row in enumerate(zip(*columns.values(), strict=True)))


def _cells(values: list[Any]) -> list[Any]:
    return [("yes" if value else "no") if isinstance(value, bool) else value for value in values]


def _write_arrays(path: Path, answers: Answers) -> None:
    import numpy as np

    arrays: dict[str, Any] = dict(answers.arrays)
    np.savez_compressed(path, **arrays)


def _write_parquet(path: Path, answers: Answers) -> None:
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {"input": range(len(answers.arrays["score"])), **answers.columns()}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


COMMAND = Command(
    "predict",
    "predict, score and decide for your inputs",
    "Writes a table with one row per input: the prediction and its standard deviation, a score that is higher for "
    "stranger inputs, and, if the posterior is calibrated, a p-value and a decision. Targets are not needed.",
    "nullbayes predict posterior.safetensors --model own:build --weights own.pt --data own:test -o scores.csv",
    _arguments,
    run,
)
