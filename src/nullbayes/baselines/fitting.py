"""The fit of a baseline from top to bottom: open the data, learn, draw samples, measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.method import FitContext, Learned, Method
from nullbayes.errors import LikelihoodError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.features import FEW
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import Network
from nullbayes.posteriors.arguments import data_and_count, draw_seed, memory_limit_bytes
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.progress import Meter, Progress
from nullbayes.precision import full_precision

Learn = Callable[[FitContext], Learned[Any]]


@dataclass(frozen=True)
class Fitted:
    """What a fit leaves behind, beside the samples."""

    state: Any  # what the method learned; None where no file or copy could hold it
    seed: int
    measured: Mapping[str, Any]  # for the report


def run_fit(
    posterior: SamplePosterior,
    method: Method[Any],
    learn: Learn,
    data: tuple[Any, Any, Any],  # loader, targets, number of samples
    *,
    choose_parameters: bool,
    generator: torch.Generator | None = None,
    memory_limit: int | str | None = None,
    progress: bool = True,
) -> tuple[Fitted, OutputJacobian, Tensor]:
    """Return what was learned, the rows that it was learned from, and the directions at the precision in use."""
    name, network, likelihood = type(posterior).__name__, posterior._network, posterior._likelihood
    loader, n_samples = data_and_count(*data)
    if n_samples < (least := max(1, posterior._fewest)):
        msg = f"n_samples must be at least {least} for {name}, not {n_samples}."
        raise SettingsError(msg)
    available = memory_limit_bytes(memory_limit, network.device)
    with Progress(show=progress) as bar:
        meter = Meter(network.device, bar.phase)
        with meter.phase("data"), full_precision():
            examples = Examples(loader, posterior._batch_fn, network.device, dtype=network.dtype)
            if choose_parameters:
                network = method.parameters(network, examples.read(0, min(FEW, len(examples)))[0])
            if method.hessian and likelihood.name == "custom":
                msg = (
                    f"{name} needs the Hessian of the loss in the outputs, which is not known for a loss of your own: "
                    "use a likelihood by name, or nb.LossProjectedPosterior, which needs gradients only."
                )
                raise LikelihoodError(msg)
            rows = OutputJacobian(network, examples, likelihood, hessian=method.hessian)
        rows.working_bytes = min(rows.working_bytes, available // 8)
        seed = draw_seed(generator)
        with meter.phase("learning"):
            learned = learn(FitContext(name, rows, n_samples, seed, available))
        with meter.phase("samples"):
            directions = draw(method, learned.state, network, seed, n_samples, posterior.prior_precision)
    measured = {
        "reason": learned.reason,
        "n_data": len(examples),
        "rank": learned.rank,
        "seconds": dict(meter.seconds),
        "peak_memory": meter.peak(),
    }
    return Fitted(learned.state, seed, measured), rows, directions


@full_precision()
def draw(method: Method[Any], state: Any, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
    """Return directions (S, P): the deviations of the samples at a prior precision, times its root."""
    return method.deviations(state, network, seed, n_samples, alpha) * math.sqrt(alpha)
