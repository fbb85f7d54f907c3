"""``nullbayes plan``: what a fit would do, and what it would take."""

from __future__ import annotations

import argparse

import nullbayes as nb
from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, folded


def _arguments(parser: argparse.ArgumentParser) -> None:
    shared.model(parser)
    shared.data(parser, "the training data")
    shared.fitting(parser)
    parser.add_argument(
        "--processes", type=shared.positive, default=1, metavar="N",
        help="for a fit by torchrun with so many processes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--parallel", choices=("data", "parameters"), default="data",
        help="what these processes share (default: %(default)s)",
    )  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the plan of a fit."""
    from nullbayes.command.data import read_pairs

    model = shared.the_model(options, console)
    found = nb.plan(
        model,
        read_pairs(options.data, "--data", console),
        n_samples=options.samples,
        memory_limit=options.memory_limit,
        likelihood=shared.the_likelihood(options.likelihood),
        loss=options.posterior == "loss-projected",
        parameters=options.parameters,
        tolerance=options.tolerance,
        processes=options.processes,
        parallel=options.parallel,
        **shared.functions(options),
    )
    console.result(folded(str(found), 13), found.to_dict())
    return 0


COMMAND = Command(
    "plan",
    "say what a fit would do, and what it would take",
    "Reads a few batches and prints the projector that a fit would use, why, and an estimate of its memory and time. "
    "Nothing is fitted.",
    "nullbayes plan --model own:build --weights own.pt --data own:train --memory-limit 8GB",
    _arguments,
    run,
)
