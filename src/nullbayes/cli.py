"""The command line: thin, no mathematics."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nullbayes as nb

if TYPE_CHECKING:
    from nullbayes.demo import Line


def main() -> None:
    """Run the command line, or say what it needs."""
    _need("click")
    _commands()()


def _need(*modules: str) -> None:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            msg = f"This command needs {name}: pip install 'nullbayes[demo]'"
            raise SystemExit(msg)


def _commands() -> Callable[[], Any]:
    import click

    @click.group()
    @click.version_option(nb.__version__, prog_name="nullbayes")
    def commands() -> None:
        """Know when not to trust a trained network, without paying for it in accuracy."""

    @commands.command()
    @click.option(
        "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("demo.png"), help="The picture."
    )
    def demo(output: Path) -> None:
        """Train a small network on digits, fit both posteriors, print a table and draw a picture."""
        run_demo(output)

    @commands.command()
    @click.argument("cases", nargs=-1, metavar="[CASE]...")
    @click.option(
        "--folder",
        type=click.Path(path_type=Path),
        help="The folder benchmarks of a checkout; default that of the one which the library is installed from.",
    )
    @click.option("--data", type=click.Path(path_type=Path), help="Folder with the data sets; default NULLBAYES_DATA.")
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--size", type=click.Choice(["small", "full"]), default="small", show_default=True)
    @click.option("--seed", type=int, default=0, show_default=True)
    @click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Replace an option of the cases.")
    @click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the results here as well.")
    @click.option("--list", "listing", is_flag=True, help="Say what cases there are.")
    def benchmark(cases: tuple[str, ...], folder: Path | None, **options: Any) -> None:
        """Run benchmark cases, all by default: each a claim, with figures and ratios measured in one run."""
        runner = load_benchmarks(folder)
        try:
            results = runner.execute(cases, **options)
        except runner.UsageError as error:
            raise click.UsageError(str(error)) from error
        if cases and any(record["skipped"] for record in results.get("cases", [])):
            raise SystemExit(1)

    return commands


def load_benchmarks(folder: Path | None = None) -> Any:
    """Return the module that runs the benchmarks of a checkout; they are no part of the installed library.

    They are the library's own, or those that one names: never what happens to lie in the current folder.
    """
    folder = (folder or Path(nb.__file__).parents[2] / "benchmarks").resolve()
    if folder.name != "benchmarks" or not (folder / "run.py").is_file():
        msg = (
            f"There are no benchmarks in {folder}: they come with the source, not with the installed library. "
            "Install a checkout (pip install -e CHECKOUT), or say where its folder is: --folder CHECKOUT/benchmarks"
        )
        raise SystemExit(msg)
    package = importlib.util.spec_from_file_location("benchmarks", folder / "__init__.py")
    assert package is not None
    sys.modules["benchmarks"] = importlib.util.module_from_spec(package)  # nothing else of the checkout can be imported
    return importlib.import_module("benchmarks.run")


def run_demo(output: Path) -> None:
    """Run the demonstration and tell what happens."""
    _need("matplotlib", "sklearn")
    if not output.absolute().parent.is_dir():
        msg = (
            f"There is no folder {output.absolute().parent} for the picture: make it, or choose another with --output."
        )
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


_LEGEND = """\
AUROC    how well a score tells the unseen 8s and 9s from test images of known digits
         (0.5 is chance, 1 is perfect).
         logits: posterior.ood_score(x), the largest variance of a logit;
                 for the network, minus its largest logit
         probs:  posterior.ood_score(x, "mutual_information");
                 for the network, one minus its largest probability
kernel   dimensions that the parameters may still move in, of all they have
std      by how much the logits of the training images vary along them: the projected
         posterior holds every logit, the loss-projected one the loss alone, so judge
         that one by its probabilities"""


def _table(lines: list[Line]) -> str:
    form = "{:<16}{:>9}{:>8}{:>8}{:>9}{:>8}{:>9}{:>11}"
    rows = [
        form.format("", "", "", "", "AUROC", "AUROC", "", "std on"),
        form.format("", "accuracy", "NLL", "ECE", "logits", "probs", "kernel", "training"),
    ]
    for line in lines:
        scores = [f"{v:.3f}" for v in (line.accuracy, line.nll, line.ece, line.auroc_logits, line.auroc_probs)]
        kernel = "-" if line.kernel_dimension is None else f"{line.kernel_dimension:,.0f}"
        rows.append(form.format(line.name, *scores, kernel, "-" if line.train_std is None else f"{line.train_std:.2g}"))
    rule = "-" * len(rows[0])
    return "\n".join(["", *rows[:2], rule, *rows[2:], rule])
