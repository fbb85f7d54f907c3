"""``nullbayes evaluate``: posteriors side by side on a user's own data, familiar and strange."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import nullbayes as nb
from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, misused


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "posteriors", nargs="+", metavar="POSTERIOR", help="files that fit wrote; LABEL=FILE names the row"
    )
    shared.model(parser)
    shared.likelihood(parser, None)
    shared.data(parser, "familiar data with targets that were not trained on")
    shared.strangers(parser, required=True)
    parser.add_argument("--scores", metavar="NAME", help='a score for all, or "all" (default: what each decides by)')
    parser.add_argument(
        "--bootstrap", type=int, default=0, metavar="N", help="resamples for 90 %% intervals (default: none)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the resamples (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the table of an evaluation."""
    import torch

    from nullbayes.command.data import read_pairs

    if options.json and options.markdown:
        msg = "--json and --markdown are two forms of the same table: choose one."
        raise misused(msg)
    paths = _labelled(options.posteriors)
    model = shared.the_model(options, console)
    methods: dict[str, Any] = {name: shared.the_posterior(path, model, options) for name, path in paths.items()}
    found = nb.evaluate(
        methods,
        read_pairs(options.data, "--data", console),
        shared.the_strangers(options, console),
        scores=options.scores,
        bootstrap=options.bootstrap,
        generator=torch.Generator().manual_seed(options.seed),
    )
    console.result(found.to_markdown() if options.markdown else str(found), found.to_dict())
    return 0


def _labelled(texts: list[str]) -> dict[str, Path]:
    """Return the files by the names of their rows, which are the names of the files unless others are given."""
    found: dict[str, Path] = {}
    for text in texts:
        label, separator, path = text.partition("=")
        name, file = (label, Path(path)) if separator and label and path else (Path(text).stem, Path(text))
        if name in found:
            msg = f"Two posteriors would be called {name!r}: name their rows, one={found[name]} other={file}."
            raise misused(msg)
        found[name] = file
    return found


COMMAND = Command(
    "evaluate",
    "compare posteriors on familiar and strange data",
    "Prints a table of how well posteriors of one model predict familiar data and how well their scores tell strangers "
    "from them. Familiar data need targets; strangers do not.",
    "nullbayes evaluate posterior.safetensors --model own:build --weights own.pt --data own:test "
    "--strangers noise=own:noise",
    _arguments,
    run,
)
