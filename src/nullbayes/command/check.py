"""``nullbayes check``: whether a posterior predicts some data as well as its network does."""

from __future__ import annotations

import argparse

from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console

_NATS, _POINTS = 3e-3, 1e-3  # what the promise of a fit allows


def _arguments(parser: argparse.ArgumentParser) -> None:
    shared.posterior(parser)
    shared.data(parser, "data with targets, those of the training for example")
    parser.add_argument(
        "--nats", type=float, default=_NATS, help="by which the NLL of a target may rise (default: %(default)s)"
    )
    parser.add_argument(
        "--points", type=float, default=_POINTS, help="by which the accuracy may fall (default: %(default)s)"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare predictions with the network's own; 1 if they are worse."""
    from nullbayes.command.data import read_pairs

    posterior = shared.the_posterior(options.posterior, shared.the_model(options, console), options)
    check = posterior.check_fit(read_pairs(options.data, "--data", console))
    rise = check.nll_posterior - check.nll_model
    fall = 0.0
    if check.accuracy_model is not None and check.accuracy_posterior is not None:
        fall = check.accuracy_model - check.accuracy_posterior
    kept = rise <= options.nats + 1e-6 * abs(check.nll_model) and fall <= options.points + 1e-9  # NaN is not kept
    network = "the network" if check.temperature == 1.0 else "the network at its temperature"
    verdict = (
        f"The promise holds: the posterior predicts these data as well as {network}."
        if kept
        else f"The promise does not hold: the posterior predicts these data worse than {network}."
    )
    console.result(f"{check}\n{verdict}", {**check.to_dict(), "kept": kept})
    return 0 if kept else 1


COMMAND = Command(
    "check",
    "say whether a posterior predicts some data as well as its network",
    "Compares likelihood and accuracy of the posterior with those of the network, at the temperature of the posterior. "
    "The exit code is 1 if the posterior is worse by more than --nats or --points.",
    "nullbayes check posterior.safetensors --model own:build --weights own.pt --data own:train",
    _arguments,
    run,
)
