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
            logits: the variance of a logit, posterior.ood_score(x, "max_variance");
                    for the network, minus its largest logit
            probs:  posterior.ood_score(x, "mutual_information");
                    for the network, one minus its largest probability
null space  dimension of the space in which the parameters may still move
std         standard deviation of the logits on the training images: the projected
            posterior keeps every logit, the loss-projected one keeps only the loss, so
            judge that one by its probabilities"""


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
        print("Fitting the projected and the loss-projected posterior to it, with their defaults.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", nb.errors.NullBayesWarning)
            lines = demo.compare(model, digits)
        print("Fitting the toy regression.")
        toy = demo.toy_regression()
    print(_table(lines))
    print(_LEGEND)
    for warning in caught:
        print("\n" + textwrap.fill(f"{type(warning.message).__name__}: {warning.message}", 88))
    demo.draw(toy, lines, output)
    print(f"\nThe picture is in {output}. All of it took {time.perf_counter() - start:.0f} s.")


def _table(lines: list[Line]) -> str:
    form = "{:<16}{:>9}{:>8}{:>8}{:>9}{:>8}{:>9}{:>11}"
    rows = [
        form.format("", "", "", "", "AUROC", "AUROC", "null", "std on"),
        form.format("", "accuracy", "NLL", "ECE", "logits", "probs", "space", "training"),
    ]
    for line in lines:
        scores = [f"{v:.3f}" for v in (line.accuracy, line.nll, line.ece, line.auroc_logits, line.auroc_probs)]
        dimension = "-" if line.kernel_dimension is None else f"{line.kernel_dimension:,.0f}"
        std = "-" if line.train_std is None else f"{line.train_std:.2g}"
        rows.append(form.format(line.name, *scores, dimension, std))
    rule = "-" * len(rows[0])
    return "\n".join(["", *rows[:2], rule, *rows[2:], rule])
