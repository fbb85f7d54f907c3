"""``nullbayes demo``: prints the table of the demonstration, which is in `nullbayes.demo`, and draws its picture."""

from __future__ import annotations

import argparse
import importlib.util
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nullbayes.command.frame import Command, Console, Refusal, writable

if TYPE_CHECKING:
    from nullbayes.demo import Line

_LEGEND = """\
accuracy    the share of the test images of known digits that are recognized: posteriors
            predict the class that the network predicts
NLL, ECE    negative log-likelihood per image, and the gap between confidence and accuracy:
            lower is better. A posterior aims at an NLL of at most 0.003 above the network's
AUROC       how well a score separates the unseen 8s and 9s from test images of known
            digits (0.5 is chance, 1 is perfect).
            as is: the largest probability for the network, the entropy for the
            posteriors, posterior.ood_score(x);
            calibrated: the same after posterior.calibrate(x, y) on held-out images,
            which learns what to trust on this network. The network itself has only its
            probabilities
flagged     the share of test images that posterior.is_ood(x, alpha=0.05) flags: on average
            at most 5 % of the known digits ({spread}), and as
            many as possible of the unseen ones"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("demo.png"), metavar="FILE", help="the picture (default: %(default)s)"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the demonstration, say what it does and what it found, and draw the picture."""
    for name in ("matplotlib", "sklearn"):
        if importlib.util.find_spec(name) is None:
            msg = f"This command needs {name}: pip install 'nullbayes[demo]'"
            raise Refusal(msg)
    output = writable(options.output, "the picture")
    import torch

    from nullbayes import demo

    start = time.perf_counter()
    digits = demo.load_digits()
    console.say(
        f"Training a small network on {len(digits.x_train)} images of the digits 0 to 7; it never sees an 8 or a 9."
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = demo.train_on_digits(digits)
        console.say("Fitting both posteriors with their defaults, and calibrating them on held-out images.")
        lines = demo.compare(model, digits)
        console.say("Fitting the toy regression.")
        toy = demo.toy_regression()
    demo.draw(toy, lines, digits, output)
    legend = _LEGEND.format(spread=_spread(lines[1], demo.ALPHA))
    text = f"{_table(lines)}\n{legend}\n\n{textwrap.fill(_decision(lines, demo.ALPHA), 88)}"
    shown = [{name: value for name, value in vars(line).items() if not isinstance(value, tuple)} for line in lines]
    console.result(text, {"picture": str(output), "methods": shown})
    console.say(f"The picture is in {output}. All of it took {time.perf_counter() - start:.0f} s.")
    return 0


def _table(lines: list[Line]) -> str:
    form = "{:<16}{:>9}{:>8}{:>8}{:>10}{:>12}{:>8}{:>8}"
    rows = [
        form.format("", "", "", "", "AUROC", "AUROC", "flagged", "flagged").rstrip(),
        form.format("", "accuracy", "NLL", "ECE", "as is", "calibrated", "known", "unseen"),
    ]
    for line in lines:
        scores = [f"{v:.3f}" for v in (line.accuracy, line.nll, line.ece, line.auroc, line.auroc_calibrated)]
        rows.append(form.format(line.name, *scores, f"{line.false_alarms:.1%}", f"{line.flagged:.1%}"))
    rule = "-" * len(rows[1])
    return "\n".join(["", *rows[:2], rule, *rows[2:], rule])


def _spread(line: Line, alpha: float) -> str:
    """Say how far the share of flagged images is from alpha by chance: both kinds of images are few."""
    n = len(line.p_values[0])
    return f"give or take {2 * (alpha * (1 - alpha) * (1 / n + 1 / line.ranked)) ** 0.5:.0%}, with {n} test images"


def _decision(lines: list[Line], alpha: float) -> str:
    line = lines[1]
    known, unseen = (int((p <= alpha).sum()) for p in line.p_values)
    return (
        f"The decision of the projected posterior: {unseen} of {len(line.p_values[1])} unseen digits are flagged, and "
        f"{known} of {len(line.p_values[0])} known ones. Its samples differ from the network in a null space of "
        f"{line.kernel_dimension:,.0f} dimensions, and change the logits of the training images by only "
        f"{line.train_std:.2g} (standard deviation)."
    )


COMMAND = Command(
    "demo",
    "train a small network on digits, fit both posteriors, print a table and draw a picture",
    "Trains a small network on the digits 0 to 7, fits both posteriors, and prints how well they predict these digits "
    "and flag 8s and 9s. The data come with scikit-learn, and all of it takes about 20 seconds.",
    "nullbayes demo -o demo.png",
    _arguments,
    run,
)
