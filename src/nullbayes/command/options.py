"""Arguments that several commands have, and what they stand for: a model with its weights, a device, a posterior."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nullbayes as nb
from nullbayes.command.frame import Console, Refusal, misused
from nullbayes.command.names import named

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nullbayes import LossProjectedPosterior, ProjectedPosterior

LIKELIHOODS = ("classification", "binary", "multilabel", "regression")
_DATA = "a loader, a dataset or a pair (x, y), or a function that returns one"


def positive(text: str) -> int:
    """Return a whole number above zero."""
    if not text.isdigit() or int(text) < 1:
        msg = f"{text!r} is not a whole number above zero"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def common(parser: argparse.ArgumentParser) -> None:
    """Add what every command has."""
    parser.add_argument("--json", action="store_true", help="print results as JSON on stdout, all else on stderr")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where to compute: cpu or cuda (default: cpu)")


def model(parser: argparse.ArgumentParser) -> None:
    """Add what a model is read by."""
    group = parser.add_argument_group("the model")
    place = "package.module:name or file.py:name of"
    group.add_argument("--model", required=True, metavar="NAME", help=f"{place} a module, or a function that makes one")
    group.add_argument("--weights", type=Path, metavar="FILE", help="its state dictionary: .pt, or .safetensors")
    group.add_argument("--output-fn", metavar="NAME", help=f"{place} a function: outputs from what the model returns")
    group.add_argument("--batch-fn", metavar="NAME", help=f"{place} a function: (inputs, targets) from a batch")
    device(group)  # type: ignore[arg-type]  # a group takes arguments as a parser does


def likelihood(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add ``--likelihood``."""
    names = ", ".join(LIKELIHOODS)
    told = f"{names}, or the name of a loss of your own" if default else "only for a loss of your own: its name"
    more = f" (default: {default})" if default else ""
    parser.add_argument("--likelihood", default=default, metavar="KIND", help=told + more)


def posterior(parser: argparse.ArgumentParser) -> None:
    """Add a posterior's file, with what it is read by."""
    parser.add_argument("posterior", type=Path, metavar="POSTERIOR", help="the file that fit wrote")
    model(parser)
    likelihood(parser, None)


def data(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--data``."""
    parser.add_argument("--data", required=True, metavar="NAME", help=f"{what}: {_DATA}")


def held_out(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--held-out``."""
    parser.add_argument("--held-out", metavar="NAME", help=f"data that were not trained on, {what}")


def strangers(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add ``--strangers``."""
    parser.add_argument(
        "--strangers", nargs="+", required=required, default=[], metavar="LABEL=NAME", action="extend",
        help="sets of inputs unlike the familiar ones, each with a label, such as noise=own:noise",
    )  # fmt: skip


def fitting(parser: argparse.ArgumentParser) -> None:
    """Add the settings of a fit, which `plan` has as well."""
    group = parser.add_argument_group("the posterior")
    group.add_argument(
        "--posterior", choices=("projected", "loss-projected"), default="projected",
        help="keep the training predictions, or the training losses (default: %(default)s)",
    )  # fmt: skip
    likelihood(group, "classification")  # type: ignore[arg-type]
    group.add_argument(
        "--parameters", nargs="+", action="extend", metavar="GLOB", help="which parameters vary (default: all of them)"
    )
    group.add_argument(
        "--samples", type=positive, default=30, metavar="N", help="number of samples (default: %(default)s)"
    )
    group.add_argument("--memory-limit", metavar="SIZE", help="such as 8GB (default: most of what is free)")
    group.add_argument(
        "--tolerance", type=float, metavar="SHARE",
        help="share of the noise's effect on the training data that may remain (default: 0.01 or 0.02)",
    )  # fmt: skip


# --- what they stand for ----------------------------------------------------------------------------------------------


def the_device(name: str) -> torch.device:
    """Return a device that is there."""
    import torch

    try:
        found = torch.device(name)
    except RuntimeError as error:
        msg = f"--device {name}: there is no such device; write cpu, cuda or cuda:1."
        raise misused(msg) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        msg = f"--device {name}: this machine has no GPU that torch can use; write --device cpu."
        raise Refusal(msg)
    return found


def the_model(options: argparse.Namespace, console: Console) -> nn.Module:
    """Return the model with its weights, on its device, ready to predict."""
    from torch import nn

    from nullbayes.command.data import call
    from nullbayes.command.weights import load_weights

    where = the_device(options.device)
    found = named(options.model, "--model")
    if not isinstance(found, nn.Module) and callable(found):
        found = call(found, options.model, "--model")
    if not isinstance(found, nn.Module):
        msg = f"--model {options.model} is a {type(found).__name__}: it should be a torch.nn.Module, or return one."
        raise misused(msg)
    if options.weights is not None:
        load_weights(found, options.weights, console)
    return found.to(where).eval()


def functions(options: argparse.Namespace) -> dict[str, Any]:
    """Return the user's functions that read batches and outputs."""
    given = {"batch_fn": options.batch_fn, "output_fn": options.output_fn}
    return {name: None if text is None else named(text, f"--{name.replace('_', '-')}") for name, text in given.items()}


def the_likelihood(text: str | None) -> Any:
    """Return the name of a likelihood, or a loss of the user's own."""
    return named(text, "--likelihood") if text is not None and ":" in text else text


def the_posterior(
    path: Path, network: nn.Module, options: argparse.Namespace
) -> ProjectedPosterior | LossProjectedPosterior:
    """Return the posterior of a file."""
    found: Any = nb.load(path, network, likelihood=the_likelihood(options.likelihood), **functions(options))
    return found  # type: ignore[no-any-return]


def the_strangers(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return the sets of strangers by their labels."""
    from nullbayes.command.data import as_inputs, read_data

    found: dict[str, Any] = {}
    for text in options.strangers:
        label, separator, name = text.partition("=")
        if not separator or not label or not name:
            msg = f"--strangers {text}: write a label before the name, such as noise={text.strip('=') or 'own:noise'}."
            raise misused(msg)
        if label in found:
            msg = f"--strangers: there are two sets called {label!r}; give each a label of its own."
            raise misused(msg)
        found[label] = as_inputs(read_data(name, "--strangers", console))
    return found
