"""``nullbayes fit``: a posterior from a trained network and its training data, in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import nullbayes as nb
from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, Refusal, folded, misused, writable

_TUNED = 1 / 3  # of the held-out data choose precision and temperature; the others calibrate
_LEAST = 40  # held-out examples that calibrate needs
_LEAST_OF_ALL = 70  # that are enough if some of them tune, whichever are drawn
_FEW = 100  # ranked examples, below which it is worth a word that a named score ranks them all


def _arguments(parser: argparse.ArgumentParser) -> None:
    shared.model(parser)
    shared.data(parser, "the training data")
    shared.held_out(parser, "which tune the posterior (one third of them) and calibrate it (the others)")
    shared.fitting(parser)
    parser.add_argument("--no-tune", action="store_true", help="only calibrate with the held-out data")
    parser.add_argument(
        "--score", metavar="NAME",
        help="the score that decides (default: combined, which is learned from half of the data that calibrate)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="from which a fit that was killed goes on")
    parser.add_argument(
        "--parallel", choices=("data", "samples", "parameters"),
        help="what the processes of torchrun share (default: data; nothing in a single process)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the posterior, .safetensors")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit a posterior, save it, and print its report; under torchrun, together with the other processes."""
    group = nb.distributed.init()
    with group.together():
        return _run(options, console, group)


def _run(options: argparse.Namespace, console: Console, group: nb.distributed.Group) -> int:
    import torch

    from nullbayes.command.data import divided, read_data, read_pairs

    output = writable(options.output, "the posterior")
    if output.suffix not in ("", ".safetensors"):
        msg = f"A posterior is written to a .safetensors file, not to {output.suffix}: choose another name with -o."
        raise misused(msg)
    if options.score is not None and options.held_out is None:
        msg = "--score needs --held-out: data that were not trained on, to calibrate with."
        raise misused(msg)
    model = shared.the_model(options, console)
    data = read_pairs(options.data, "--data", console)
    held_out = None if options.held_out is None else read_data(options.held_out, "--held-out", console)
    kind = nb.LossProjectedPosterior if options.posterior == "loss-projected" else nb.ProjectedPosterior
    posterior = kind(
        model,
        shared.the_likelihood(options.likelihood),
        parameters=options.parameters,
        **shared.functions(options),
    )
    _check_score(options.score, posterior.scores)
    tuning, calibrating = (None, held_out)
    if held_out is not None and not options.no_tune:
        _check_targets(held_out, options.held_out)
        tuning, calibrating = divided(held_out, _TUNED)
    if calibrating is not None:
        _check_number(held_out, calibrating, options.held_out)
    posterior.fit(
        data,
        n_samples=options.samples,
        held_out=tuning,
        tolerance=options.tolerance,
        generator=torch.Generator().manual_seed(options.seed),
        memory_limit=options.memory_limit,
        checkpoint=options.checkpoint,
        parallel=options.parallel or ("data" if group.size > 1 else None),
    )
    if console.interrupted:
        more = "" if options.checkpoint is None else f"; the same command goes on from {options.checkpoint}"
        msg = f"interrupted during the fit: nothing was saved{more}."
        raise Refusal(msg, 130)
    posterior.release()  # the memory of the rows
    if calibrating is not None:
        console.say("Calibrating with held-out data.")
        posterior.calibrate(calibrating, kind=options.score)
    if group.rank == 0 or options.parallel == "parameters":  # whose samples are collected from all processes
        posterior.save(output)
    calibration = posterior.calibration
    text = folded(str(posterior.report) + ("" if calibration is None else f"\n{_ranked(calibration)}"), 18)
    found: dict[str, Any] = {
        "posterior": str(output),
        "kind": type(posterior).__name__,
        "report": posterior.report.to_dict(),
        "calibration": None if calibration is None else calibration.to_dict(),
    }
    console.result(text, found)
    if calibration is not None and calibration.n_learned and len(calibration.scores) < _FEW:
        other = "generalized_entropy" if "generalized_entropy" in posterior.scores else "max_variance"
        console.say(
            f"Only {len(calibration.scores)} held-out examples are ranked, because the score was learned from "
            f"{calibration.n_learned} others. A score that is named, such as --score {other}, ranks all of them."
        )
    console.say(f"The posterior is in {output}." + ("" if calibration else " It is not calibrated: no --held-out."))
    return 0


def _check_score(name: str | None, known: tuple[str, ...]) -> None:
    """Refuse a score that there is not, before a fit that would be thrown away."""
    if name is not None and name not in known:
        msg = f"--score {name}: this posterior has no such score; it has {', '.join(known)}."
        raise Refusal(msg)


def _check_targets(held_out: Any, name: str) -> None:
    from nullbayes.command.data import is_array

    if is_array(held_out):
        msg = (
            f"--held-out {name} is inputs without targets, which tuning needs: pass a pair (x, y), or --no-tune, "
            "which only calibrates."
        )
        raise Refusal(msg)


def _check_number(held_out: Any, calibrating: Any, name: str) -> None:
    """Refuse held-out data that are too few to calibrate with, before a fit that would be thrown away."""
    from nullbayes.command.data import number_of

    try:
        left = number_of(calibrating, _LEAST)
    except TypeError:  # batches of another form, which --batch-fn takes apart: calibrate counts them
        return
    if left >= _LEAST:
        return
    total = number_of(held_out, 2 * _LEAST)
    if total == left:
        msg = f"--held-out {name} has {total} examples, and calibrate needs at least {_LEAST}: pass more."
    elif total < _LEAST:
        msg = (
            f"--held-out {name} has {total} examples, and calibrate needs at least {_LEAST}, beside those that tune, "
            f"about a third of all: pass {_LEAST_OF_ALL} or more."
        )
    else:
        msg = (
            f"--held-out {name} has {total} examples. About a third of them are kept for tuning, and the {left} that "
            f"are left are too few for calibrate, which needs at least {_LEAST}: pass more, or --no-tune, which leaves "
            "all of them for calibrate."
        )
    raise Refusal(msg)


def _ranked(calibration: Any) -> str:
    n = len(calibration.scores)
    return f"{'calibrated':<17} {n:,} held-out examples to rank new inputs among: p-values from {1 / (n + 1):.2g} on"


COMMAND = Command(
    "fit",
    "fit a posterior to a trained network",
    "Draws samples around the weights of a trained network that predict its training data as the network does, and "
    "saves them. With held-out data the posterior is also tuned and calibrated, and can say yes or no to an input.",
    "nullbayes fit --model own:build --weights own.pt --data own:train --held-out own:held_out "
    "-o posterior.safetensors",
    _arguments,
    run,
)
