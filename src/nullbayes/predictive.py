r"""Predictions shared by all methods: output samples, their mean and variance, and the probabilities they stand for.

A posterior is a set of directions around the trained parameters. Linearized, sample :math:`s` of the outputs is
:math:`f(\theta, x) + J(x)\,\delta_s`; the mean of that Gaussian is :math:`f(\theta, x)` exactly, so samples are centred
on it. Sampled, it is the network itself at :math:`\theta + \delta_s`.
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
from nullbayes.likelihoods import Classification, Likelihood
from nullbayes.memory import give_back, is_out_of_memory

PRED_TYPES = ("linearized", "sampled")
LINKS = ("margin", "probit", "bridge", "mc")
SCORES = ("max_variance", "sum_variance", "max_prob_variance", "entropy", "mutual_information")
_EXAMPLES_TIMES_SAMPLES = {"cpu": 8192, "cuda": 2**18}  # in memory at a time


@dataclass(frozen=True)
class Prediction:
    """What the posterior says about N inputs.

    Attributes
    ----------
    mean : Tensor (N, ...)
        Mean of the outputs (logits, for a classifier): the network's own outputs for linearized predictions, the mean
        over the samples for sampled ones.
    variance : Tensor (N, ...)
        Their variance: how far the training data leave the output open. A regression's noise is not in it: add
        ``posterior.likelihood.sigma_noise**2`` for intervals of targets.
    probs : Tensor (N, ...) or None
        Probabilities, averaged over the posterior and at its temperature; None for likelihoods without any.
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


def sample_outputs(
    network: Network, x: Any, directions: Tensor, pred_type: str, root: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the mean outputs (n, ...) on one batch of inputs, and how far each sample is from them, (S, n, ...).

    Directions are divided by ``root``; for linearized predictions their few products are, not their many numbers.
    """
    if pred_type == "linearized":
        outputs, change = linearized(network, x, directions)
        return outputs, centred(change / root)
    if pred_type == "sampled":
        with torch.no_grad():
            samples = torch.stack([network(network.theta + direction / root, x) for direction in directions])
        return samples.mean(0), samples - samples.mean(0)
    msg = f"pred_type must be one of {', '.join(PRED_TYPES)}, not {pred_type!r}."
    raise SettingsError(msg)


def centred(changes: Tensor) -> Tensor:  # (S, ...)
    """Subtract the mean over the samples, which is Monte Carlo error where the expectation is zero."""
    return changes - changes.mean(0)


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
    directions: Tensor,
    *,
    root: float = 1.0,
    pred_type: str = "linearized",
    link: str | None = None,
    batch_fn: BatchFn | None = None,
) -> Prediction:
    """Predict for inputs or a loader of them, with samples at the directions divided by ``root``."""
    pieces = stream(x, network, batch_fn, len(directions))
    means, changes = zip(*(_in_halves(network, piece, directions, pred_type, root) for piece in pieces), strict=True)
    return summarize(torch.cat(means), torch.cat(changes, dim=1), likelihood, link or default_link(pred_type))


def default_link(pred_type: str) -> str:
    """Return how probabilities are averaged unless the user says otherwise."""
    return "margin" if pred_type == "linearized" else "mc"


def _in_halves(network: Network, x: Any, directions: Tensor, pred_type: str, root: float) -> tuple[Tensor, Tensor]:
    """Return what :func:`sample_outputs` does, for half of the inputs at a time where memory runs out."""
    size = n_examples(x)
    try:
        return sample_outputs(network, x, directions, pred_type, root)
    except (RuntimeError, MemoryError) as error:
        if size == 1 or not is_out_of_memory(error):
            raise
    give_back()
    halves = (take_examples(x, 0, size // 2), take_examples(x, size // 2, size))
    (first, a), (second, b) = (_in_halves(network, half, directions, pred_type, root) for half in halves)
    return torch.cat([first, second]), torch.cat([a, b], dim=1)


def summarize(mean: Tensor, changes: Tensor, likelihood: Likelihood, link: str) -> Prediction:  # (N, ...), (S, N, ...)
    """Make a prediction of mean outputs and of how far each sample is from them."""
    if link not in LINKS:
        msg = f"link_approx must be one of {', '.join(LINKS)}, not {link!r}."
        raise SettingsError(msg)
    samples = mean + changes
    variance = changes.square().sum(0) / (len(changes) - 1)
    probs = _average(mean, changes, variance, likelihood, link) if likelihood.has_probabilities else None
    if not torch.isfinite(variance).all():
        message = (
            f"Some predictions or their variances are not finite in {str(samples.dtype).removeprefix('torch.')}: use a "
            "larger prior_precision, or scale the outputs."
        )
        warnings.warn(message, NullBayesWarning, stacklevel=2)
    return Prediction(mean, variance, probs, samples)


def _average(mean: Tensor, changes: Tensor, variance: Tensor, likelihood: Likelihood, link: str) -> Tensor:
    """Return the probabilities, averaged over the posterior in the way that ``link`` names."""
    if link == "mc":
        return likelihood.probabilities(mean + changes).mean(0)
    if link == "margin" or not isinstance(likelihood, Classification):
        if link == "bridge":
            msg = f'link_approx="bridge" is for classification, not for a {likelihood.name} likelihood: use "probit".'
            raise LikelihoodError(msg)
        return likelihood.probabilities(mean, likelihood.link_variance(mean, changes))
    if link == "probit":
        return likelihood.probit(mean, variance)
    return likelihood.bridge(mean, changes)


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
    if kind == "entropy":
        return likelihood.entropy_terms(prediction.probs).flatten(1).sum(1)
    probs = likelihood.probabilities(prediction.samples)
    if kind == "max_prob_variance":
        return probs.var(0).flatten(1).amax(1)
    total, each = likelihood.entropy_terms(probs.mean(0)), likelihood.entropy_terms(probs).mean(0)
    return (total - each).flatten(1).sum(1).clamp_min(0.0)


def nll(
    likelihood: Likelihood, outputs: Tensor, changes: Tensor | None, targets: Tensor, link: str = "margin"
) -> float:  # (N, ...), (S, N, ...)
    """Return minus the mean log predictive density of a target, at mean outputs and centred changes of them.

    ``changes=None`` is the network itself. A ``link`` other than "mc" means the closed form, where there is one.
    """
    if changes is None:
        values = likelihood.nll(outputs, targets)
    elif link == "mc" or not likelihood.has_closed_form:
        each = torch.stack([likelihood.nll(outputs + change, targets) for change in changes])
        values = math.log(len(changes)) - torch.logsumexp(-each, 0)
    else:
        values = likelihood.nll(outputs, targets, likelihood.link_variance(outputs, changes))
    return float(values.sum()) / max(1, likelihood.n_targets(outputs, targets))
