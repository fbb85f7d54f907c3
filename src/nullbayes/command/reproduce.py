"""``nullbayes reproduce``: an experiment of the paper, with its results and a page."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, folded, misused
from nullbayes.experiments import find, names


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help=f"one of {', '.join(names())}; without it, says what each of them shows"
    )
    parser.add_argument("--quick", action="store_true", help="minutes on two cores, for a first look")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="the data sets (default: $NULLBAYES_DATA)")
    shared.device(parser)
    parser.add_argument(
        "--seeds",
        type=shared.positive,
        default=3,
        metavar="N",
        help="how many random seeds to average over (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        default="",
        metavar="NAME,...",
        help="run these methods alone, such as KNN,SCOD (default: all); a later run without it does the rest",
    )
    parser.add_argument(
        "--from", dest="earlier", type=Path, metavar="FILE",
        help="results.json of an earlier run, perhaps elsewhere: its steps are not repeated",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("results"), metavar="FOLDER",
        help="where results go, into a folder with the name of the experiment (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="start anew: discard what an earlier run has left there")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run an experiment, and say where its page is; without a name, say which there are."""
    if options.name is None:
        return _list(console)
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
        methods=_methods(options.name, options.methods),
        earlier=_earlier(options.name, options.earlier),
        fresh=options.fresh,
        say=console.say,
    )
    page, figures = folder / "index.html", folder / "results.json"
    console.result(
        f"The page is {page}, which a browser shows; the figures are in {figures}.",
        {"experiment": options.name, "folder": str(folder), "page": str(page), "figures": str(figures)},
    )
    return 0


def _methods(experiment: str, given: str) -> tuple[str, ...]:
    """Return the methods that were named; refuse names that there are not."""
    import nullbayes as nb
    from nullbayes.experiments.judging import POSTERIORS

    asked = tuple(name.strip() for name in given.split(",") if name.strip())
    if asked:
        _check_study(experiment, "--methods")
    both = vars(nb.baselines) | vars(nb.detectors)
    known = [*POSTERIORS.values(), *(name for name, kind in both.items() if isinstance(kind, type))]
    if strange := [name for name in asked if name not in known]:
        msg = (
            f"There is no method {strange[0]!r}: there are {known[0]}, {known[1]}, and those of nb.baselines and "
            "nb.detectors, such as SWAG and KNN."
        )
        raise misused(msg)
    return asked


def _earlier(experiment: str, given: Path | None) -> Path | None:
    """Return the file of the earlier results; refuse one that is not there."""
    if given is not None:
        _check_study(experiment, "--from")
        if not given.is_file():
            msg = f"There is no file {given} with results of an earlier run."
            raise misused(msg)
    return given


def _check_study(experiment: str, option: str) -> None:
    """Refuse an option of studies for other experiments."""
    if not find(experiment).by_method:
        own = ", ".join(name for name in names() if find(name).by_method)
        msg = f"{experiment} is no study of many methods: {option} is for {own}."
        raise misused(msg)


def _list(console: Console) -> int:
    """Say what each experiment shows and needs."""
    found = [find(name) for name in names()]
    width = 2 + max(len(each.name) for each in found)
    lines = (f"{each.name:{width}}{each.about}{_needs(each.needs)}" for each in found)
    console.result(
        "\n".join(folded(line, width) for line in lines),
        {each.name: {"about": each.about, "needs": list(each.needs)} for each in found},
    )
    console.say("Run one of them with: nullbayes reproduce NAME --quick. It says first what it will take.")
    return 0


def _needs(needs: tuple[str, ...]) -> str:
    return f" Needs {', '.join(needs)}." if needs else ""


COMMAND = Command(
    "reproduce",
    "run an experiment of the paper",
    "Says what it will take, trains or loads networks, fits every method that applies, and writes results.json and a "
    "page with the paper's figures beside ours. A run that was stopped goes on when the same command is typed again.",
    "nullbayes reproduce toy --quick -o results",
    _arguments,
    run,
)
