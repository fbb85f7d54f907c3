r"""Predictions shared by all methods: output samples, their mean and variance, and the probabilities they stand for.

A posterior is a set of directions around the trained parameters. Linearized, sample :math:`s` of the outputs is
:math:`f(\theta, x) + J(x)\,\delta_s`; the mean of that Gaussian is :math:`f(\theta, x)` exactly, so samples are centred
on it. Sampled, it is the network itself at :math:`\theta + \delta_s`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nullbayes.errors import DataError, LikelihoodError, NullBayesWarning, SettingsError
from nullbayes.jacobian.batches import (
    BatchFn,
    as_tensors,
    inputs_of,
    is_array,
    leaves,
    map_leaves,
    n_examples,
    take_examples,
    to_device,
)
from nullbayes.jacobian.loaders import as_loader, check_order
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Classification, Likelihood
from nullbayes.memory import give_back, is_out_of_memory
from nullbayes.predictive.masks import Mask, Masks
from nullbayes.predictive.prediction import Prediction

PRED_TYPES = ("linearized", "sampled")
LINKS = ("margin", "probit", "bridge", "mc")
_EXAMPLES_TIMES_SAMPLES = {"cpu": 8192, "cuda": 2**18}  # in memory at a time


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

    A tensor or an array, a tuple (several arguments) or a mapping (named arguments) is one input; a dataset, or
    anything else that can be iterated, a DataLoader or a list, is a loader of inputs, or of pairs with targets, which
    are passed over.
    """
    one = is_array(x) or isinstance(x, (tuple, Mapping))
    x = inputs_of(x, None, network.input_signature) if isinstance(x, Mapping) else x  # a batch with its targets will do
    if not one and not isinstance(x, (Iterable, Dataset)):
        msg = f"Inputs must be a tensor, an array, a tuple, a mapping or a loader of these, not {type(x).__name__}."
        raise DataError(msg)
    size, empty = max(1, _EXAMPLES_TIMES_SAMPLES.get(network.device.type, 8192) // max(1, n_samples)), True
    loader = [x] if one else as_loader(x)
    check_order(loader, "Answers come in the order of the inputs, one for each")
    for batch in loader:
        inputs = as_tensors(batch if one else inputs_of(batch, batch_fn, network.input_signature), network.dtype)
        if any(leaf.is_floating_point() and not torch.isfinite(leaf).all() for leaf in leaves(inputs)):
            msg = "The inputs hold NaN or Inf."
            raise DataError(msg)
        total = n_examples(inputs)
        network.check_form(inputs)
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
    mask: Mask = None,
) -> Prediction:
    """Predict for inputs or a loader of them, with samples at the directions divided by ``root``."""
    means, changes, masks = [], [], Masks(likelihood, mask)
    for piece in stream(x, network, batch_fn, len(directions)):
        mean, change = _in_halves(network, piece, directions, pred_type, root)
        masks.look(piece, mean)
        means.append(mean)
        changes.append(change)
    mean, link = joined(means), link or default_link(pred_type)
    made = summarize(mean, torch.cat(changes, dim=1), likelihood, link, masks.joined(mean))
    return replace(made, index=x.index) if hasattr(x, "iloc") else made


def joined(parts: list[Tensor]) -> Tensor:  # (n, ...) each
    """Return the outputs of several batches as one."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        named = " and ".join(str(("n", *shape)) for shape in sorted(shapes))
        msg = f"The batches give outputs of shapes {named}: pad them to one length, or predict batch by batch."
        raise DataError(msg)
    return torch.cat(parts)


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


def summarize(
    mean: Tensor, changes: Tensor, likelihood: Likelihood, link: str, mask: Tensor | None = None
) -> Prediction:  # (N, ...), (S, N, ...)
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
    noise = likelihood.noise_variance(mean)
    return Prediction(mean, variance, probs, samples, noise, mask, likelihood.name)


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
