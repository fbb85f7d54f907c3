"""The command ``nullbayes``. It parses arguments and prints; the demonstration itself is in `nullbayes.demo`."""

from __future__ import annotations

import argparse
import importlib.util
import textwrap
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nullbayes as nb

if TYPE_CHECKING:
    from nullbayes.demo import Line

_LEGEND = """\
AUROC       how well a score separates the unseen 8s and 9s from test images of known
            digits (0.5 is chance, 1 is perfect).
            as is: the largest probability for the network, generalized entropy
            for the posteriors, posterior.ood_score(x);
            calibrated: the same after posterior.calibrate(x, y) on held-out images,
            which learns what to trust on this network. The network itself has only its
            probabilities
flagged     the share of test images that posterior.is_ood(x, alpha=0.05) flags: at most
            about 5 % of the known digits, and as many as possible of the unseen ones"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="nullbayes", description="Know when not to trust a trained network, without paying for it in accuracy."
    )
    parser.add_argument("--version", action="version", version=f"nullbayes {nb.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "train a small network on digits, fit both posteriors, print a table and draw a picture"
    demo = commands.add_parser("demo", help=about, description=about.capitalize() + ".")
    demo.add_argument("--output", type=Path, default=Path("demo.png"), help="the picture (default: %(default)s)")
    run_demo(parser.parse_args(arguments).output)


def run_demo(output: Path) -> None:
    """Run the demonstration, print what it does and what it found, and draw the picture."""
    for name in ("matplotlib", "sklearn"):
        if importlib.util.find_spec(name) is None:
            msg = f"This command needs {name}: pip install 'nullbayes[demo]'"
            raise SystemExit(msg)
    folder = output.absolute().parent
    if not folder.is_dir():
        msg = f"There is no folder {folder} for the picture: make it, or choose another with --output."
        raise SystemExit(msg)
    import torch

    from nullbayes import demo

    start = time.perf_counter()
    digits = demo.load_digits()
    print(f"Training a small network on {len(digits.x_train)} images of the digits 0 to 7; it never sees an 8 or a 9.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = demo.train_on_digits(digits)
        print("Fitting both posteriors with their defaults, and calibrating them on held-out images.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", nb.errors.NullBayesWarning)
            lines = demo.compare(model, digits)
        print("Fitting the toy regression.")
        toy = demo.toy_regression()
    print(_table(lines))
    print(_LEGEND)
    for warning in caught:
        print("\n" + textwrap.fill(f"{type(warning.message).__name__}: {warning.message}", 88))
    print("\n" + textwrap.fill(_decision(lines, demo.ALPHA), 88))
    demo.draw(toy, lines, digits, output)
    print(f"\nThe picture is in {output}. All of it took {time.perf_counter() - start:.0f} s.")


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


def _decision(lines: list[Line], alpha: float) -> str:
    line = lines[1]
    known, unseen = (int((p <= alpha).sum()) for p in line.p_values)
    return (
        f"The decision of the projected posterior: {unseen} of {len(line.p_values[1])} unseen digits are flagged, and "
        f"{known} of {len(line.p_values[0])} known ones. Its samples move in {line.kernel_dimension:,.0f} dimensions, "
        f"and change the logits of the training images by {line.train_std:.2g}."
    )
