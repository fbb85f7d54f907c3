"""The fit of a baseline from top to bottom: open the data, learn, draw samples, measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.method import Context, Learned, Method
from nullbayes.errors import LikelihoodError, SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors import noise
from nullbayes.posteriors.arguments import data_and_count
from nullbayes.posteriors.progress import Progress
from nullbayes.posteriors.resources import Meter, memory_limit_bytes
from nullbayes.precision import full_precision

Learn = Callable[[Context], Learned[Any]]


@dataclass(frozen=True)
class Fitted:
    """What a fit leaves behind, beside the samples."""

    state: Any  # what the method learned; None where no file or copy could hold it
    seed: int
    measured: Mapping[str, Any]  # for the report


def check_data(name: str, method: Method[Any], loader: Any, targets: Any, n_samples: Any) -> tuple[Any, int]:
    """Return the data and the number of samples of a call of ``fit``, or refuse fewer samples than a method needs."""
    data, n_samples = data_and_count(loader, targets, n_samples)
    if n_samples < method.least_samples:
        msg = f"n_samples must be at least {method.least_samples} for {name}, not {n_samples}."
        raise SettingsError(msg)
    return data, n_samples


def run_fit(
    name: str,
    method: Method[Any],
    learn: Learn,
    network: Network,
    likelihood: Likelihood,
    batch_fn: BatchFn | None,
    loader: Any,
    n_samples: int,
    *,
    alpha: float,
    choose_parameters: bool,
    generator: torch.Generator | None = None,
    memory_limit: int | str | None = None,
    progress: bool = True,
) -> tuple[Fitted, Network, Likelihood, Tensor]:
    """Return what was learned, the network with the parameters that vary, the filled-in likelihood, the directions."""
    available = memory_limit_bytes(memory_limit, network.device)
    with Progress(show=progress) as bar:
        meter = Meter(network.device, bar.phase)
        with meter.phase("data"), full_precision():
            examples = Examples(loader, batch_fn, network.device, dtype=network.dtype)
            if choose_parameters:
                network = method.parameters(network, examples.read(0, 1)[0])
            if method.hessian and likelihood.name == "custom":
                msg = (
                    f"{name} needs the Hessian of the loss in the outputs, which is not known for a loss of your own: "
                    "use a likelihood by name, or nb.LossProjectedPosterior, which needs gradients only."
                )
                raise LikelihoodError(msg)
            rows = OutputJacobian(network, examples, likelihood, hessian=method.hessian)
        rows.working_bytes = min(rows.working_bytes, available // 8)
        seed = noise.draw_seed(generator)
        learned = learn(Context(name, rows, n_samples, seed, available, meter))
        with meter.phase("samples"):
            directions = draw(method, learned.state, network, seed, n_samples, alpha)
    measured = {
        "reason": learned.reason,
        "n_data": len(examples),
        "rank": learned.rank,
        "seconds": dict(meter.seconds),
        "peak_memory": meter.peak(),
    }
    return Fitted(learned.state, seed, measured), network, rows.likelihood, directions


@full_precision()
def draw(method: Method[Any], state: Any, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
    """Return directions (S, P): the deviations of the samples at a prior precision, times its root."""
    return method.deviations(state, network, seed, n_samples, alpha) * math.sqrt(alpha)
