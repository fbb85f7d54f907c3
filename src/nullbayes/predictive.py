r"""One predictive for all methods: samples of the outputs, and what is read off them.

A posterior is a set of directions around the trained parameters. Linearized, sample :math:`s` of the outputs is
:math:`f(\theta, x) + J(x)\,\delta_s`; sampled, it is the network itself at :math:`\theta + \delta_s`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import DataError, LikelihoodError, NullBayesWarning, SettingsError
from nullbayes.jacobian.batches import BatchFn, inputs_of, leaves, map_leaves, n_examples, take_examples, to_device
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Likelihood
from nullbayes.memory import give_back, is_out_of_memory

PRED_TYPES = ("linearized", "sampled")
SCORES = ("max_variance", "sum_variance", "max_prob_variance", "entropy", "mutual_information")
_EXAMPLES_TIMES_SAMPLES = {"cpu": 8192, "cuda": 2**18}  # in memory at a time


@dataclass(frozen=True)
class Prediction:
    """What the posterior says about N inputs.

    Attributes
    ----------
    mean : Tensor (N, ...)
        Mean of the outputs over the samples (logits, for a classifier).
    variance : Tensor (N, ...)
        Their variance: how far the training data leave the output open. A regression's noise is not in it: add
        ``posterior.likelihood.sigma_noise**2`` for intervals of targets.
    probs : Tensor (N, ...) or None
        Mean of the probabilities over the samples; None for likelihoods without any.
    samples : Tensor (S, N, ...)
        The outputs of each sample, in the shape that the model gives them: (N, O) for most.
    """

    mean: Tensor
    variance: Tensor
    probs: Tensor | None
    samples: Tensor

    def __repr__(self) -> str:
        """Give the shapes; the numbers would fill pages."""
        tensors = ((field.name, getattr(self, field.name)) for field in fields(self))
        shapes = (f"{name} {value if value is None else tuple(value.shape)}" for name, value in tensors)
        return f"Prediction({', '.join(shapes)})"


def sample_outputs(network: Network, x: Any, deviations: Tensor, pred_type: str) -> Tensor:  # (S, P) -> (S, n, ...)
    """Return the outputs of each sample on one batch of inputs."""
    if pred_type == "linearized":
        outputs, change = linearized(network, x, deviations)
        return outputs + change
    if pred_type == "sampled":
        with torch.no_grad():
            return torch.stack([network(network.theta + deviation, x) for deviation in deviations])
    msg = f"pred_type must be one of {', '.join(PRED_TYPES)}, not {pred_type!r}."
    raise SettingsError(msg)


def stream(x: Any, network: Network, batch_fn: BatchFn | None, n_samples: int) -> Iterator[Any]:
    """Iterate over inputs in pieces that fit in memory, on the network's device.

    A tensor, a tuple (several arguments) or a mapping (named arguments) is one input; anything else that can be
    iterated, a DataLoader or a list, is a loader of inputs, or of pairs with targets, which are passed over.
    """
    one = isinstance(x, (Tensor, tuple, Mapping))
    if not one and not isinstance(x, Iterable):
        msg = f"Inputs must be a tensor, a tuple, a mapping or a loader of these, not {type(x).__name__}."
        raise DataError(msg)
    size, empty = max(1, _EXAMPLES_TIMES_SAMPLES.get(network.device.type, 8192) // max(1, n_samples)), True
    for batch in [x] if one else x:
        inputs = batch if one else inputs_of(batch, batch_fn)
        if any(leaf.is_floating_point() and not torch.isfinite(leaf).all() for leaf in leaves(inputs)):
            msg = "The inputs hold NaN or Inf."
            raise DataError(msg)
        total = n_examples(inputs)
        for start in range(0, total, size):
            piece = map_leaves(lambda leaf, start=start: leaf[start : start + size] if leaf.ndim else leaf, inputs)
            yield to_device(piece, network.device)
            empty = False
    if empty:
        msg = "There is nothing to predict: the loader yields no batch, or only empty ones."
        raise DataError(msg)


def predict(
    network: Network,
    likelihood: Likelihood,
    x: Any,
    deviations: Tensor,
    *,
    pred_type: str = "linearized",
    batch_fn: BatchFn | None = None,
) -> Prediction:
    """Predict for inputs or a loader of them."""
    parts = [
        _in_halves(network, piece, deviations, pred_type) for piece in stream(x, network, batch_fn, len(deviations))
    ]
    return summarize(torch.cat(parts, dim=1), likelihood)


def _in_halves(network: Network, x: Any, deviations: Tensor, pred_type: str) -> Tensor:  # (S, P) -> (S, n, ...)
    """Return the outputs of each sample, half of the inputs at a time where memory runs out."""
    size = n_examples(x)
    try:
        return sample_outputs(network, x, deviations, pred_type)
    except (RuntimeError, MemoryError) as error:
        if size == 1 or not is_out_of_memory(error):
            raise
    give_back()
    halves = (take_examples(x, 0, size // 2), take_examples(x, size // 2, size))
    return torch.cat([_in_halves(network, half, deviations, pred_type) for half in halves], dim=1)


def summarize(samples: Tensor, likelihood: Likelihood) -> Prediction:  # (S, N, ...)
    """Reduce output samples to mean, variance and mean probabilities."""
    probs = likelihood.probabilities(samples).mean(0) if likelihood.has_probabilities else None
    variance = samples.var(0)
    if not torch.isfinite(variance).all():
        message = (
            f"Some predictions or their variances are not finite in {str(samples.dtype).removeprefix('torch.')}: use a "
            "larger prior_precision, or scale the outputs."
        )
        warnings.warn(message, NullBayesWarning, stacklevel=2)
    return Prediction(samples.mean(0), variance, probs, samples)


def score(prediction: Prediction, likelihood: Likelihood, kind: str) -> Tensor:  # (N,)
    """Return one number an input, higher where it is stranger.

    ``max_variance`` (the paper's text) and ``sum_variance`` are of the outputs; ``max_prob_variance`` (the authors'
    code) of the probabilities; ``entropy`` is that of the mean prediction, ``mutual_information`` its part that the
    samples disagree on.
    """
    if kind not in SCORES:
        msg = f"kind must be one of {', '.join(SCORES)}, not {kind!r}."
        raise SettingsError(msg)
    if kind == "max_variance":
        return prediction.variance.flatten(1).amax(1)
    if kind == "sum_variance":
        return prediction.variance.flatten(1).sum(1)
    if prediction.probs is None:
        msg = f"kind={kind!r} needs probabilities, which a {likelihood.name} likelihood has not: use 'max_variance'."
        raise LikelihoodError(msg)
    probs = likelihood.probabilities(prediction.samples)
    if kind == "max_prob_variance":
        return probs.var(0).flatten(1).amax(1)
    total = likelihood.entropy_terms(prediction.probs)
    if kind == "mutual_information":
        return (total - likelihood.entropy_terms(probs).mean(0)).flatten(1).sum(1).clamp_min(0.0)
    return total.flatten(1).sum(1)


def mean_nll(samples: Tensor, targets: Tensor, likelihood: Likelihood) -> float:  # (S, N, ...)
    """Return minus the mean log of the *mean* predictive density at the targets."""
    losses = torch.stack([likelihood.loss(outputs, targets) for outputs in samples]).double()
    constant = math.log(len(losses)) + likelihood.constant(samples[0, 0].numel())
    return constant - float(torch.logsumexp(-losses, 0).mean())
