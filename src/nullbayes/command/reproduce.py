"""``nullbayes reproduce``: an experiment of the paper, with its results and a page."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, misused
from nullbayes.experiments import names


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="minutes on two cores, for a first look")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="data sets (default: $NULLBAYES_DATA)")
    shared.device(parser)
    parser.add_argument(
        "--seeds", type=shared.positive, default=3, metavar="N", help="how many, from 0 on (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("results"), metavar="FOLDER",
        help="where the folder of the run is made, named as the experiment (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="discard what an earlier run has left there")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run an experiment, and say where its page is."""
    if options.name not in names():
        msg = f"There is no experiment {options.name!r}: there are {', '.join(names())}."
        raise misused(msg)
    given = os.environ.get("NULLBAYES_DATA")
    data = options.data or (Path(given) if given else None)
    if data is not None and not data.is_dir():
        msg = f"There is no folder {data} with data sets: name it with --data."
        raise misused(msg)
    from nullbayes.experiments import running

    folder = running.reproduce(
        options.name,
        options.output,
        data=data,
        device=shared.the_device(options.device),
        quick=options.quick,
        seeds=options.seeds,
        fresh=options.fresh,
        say=console.say,
    )
    page = folder / "index.html"
    console.result(f"The page is {page}.", {"experiment": options.name, "folder": str(folder), "page": str(page)})
    return 0


COMMAND = Command(
    "reproduce",
    "run an experiment of the paper",
    "Trains or loads networks, fits every method that applies, and writes results.json and a page with the paper's "
    "figures beside ours. A run that was killed goes on where it was when the same command is typed again.",
    "nullbayes reproduce toy --quick -o results",
    _arguments,
    run,
)
