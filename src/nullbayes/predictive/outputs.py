r"""Predictions shared by all methods: output samples, their mean and variance, and probabilities.

A posterior is a set of directions :math:`\delta_s` around the trained parameters. A linearized sample of the outputs is
:math:`f(\theta, x) + J(x)\,\delta_s`. The mean of this Gaussian is exactly :math:`f(\theta, x)`, so that samples are
centred on it. A sampled one is the output of the network with the parameters :math:`\theta + \delta_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nullbayes.errors import DataError, LikelihoodError, SettingsError, warn
from nullbayes.jacobian.batches import (
    BatchFn,
    as_tensors,
    check_columns,
    first_bad,
    inputs_of,
    is_array,
    leaves,
    n_examples,
    take_examples,
    to_device,
)
from nullbayes.jacobian.loaders import as_loader, batch_fn_for, check_order
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import centred, linearized
from nullbayes.likelihoods import Classification, Likelihood
from nullbayes.limits import OutOfMemory
from nullbayes.predictive.prediction import Prediction

PRED_TYPES = ("linearized", "sampled")
LINKS = ("margin", "probit", "bridge", "mc")
_EXAMPLES_TIMES_SAMPLES = {"cpu": 8192, "cuda": 2**18}  # in memory at the same time

Mask = None | str | Tensor | np.ndarray | Callable[[Any], Any]


def sample_outputs(
    network: Network, x: Any, directions: Tensor, pred_type: str, root: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the mean outputs (n, ...) for one batch of inputs, and the deviations (S, n, ...) of the samples.

    Directions are divided by ``root``. Linearized predictions divide the products instead, which have fewer entries.
    """
    if pred_type == "linearized":
        outputs, change = linearized(network, x, directions)
        return outputs, centred(change / root)
    if pred_type == "sampled":
        with torch.no_grad():
            whole, each = network.whole, (network.all_columns(direction) for direction in directions)
            samples = torch.stack([whole(whole.theta + direction / root, x) for direction in each])
        return samples.mean(0), samples - samples.mean(0)
    msg = f"pred_type must be one of {', '.join(PRED_TYPES)}, not {pred_type!r}."
    raise SettingsError(msg)


def stream(x: Any, network: Network, batch_fn: BatchFn | None, n_samples: int) -> Iterator[Any]:
    """Iterate over inputs in chunks that fit in memory, on the device of the network.

    A tensor, an array, a tuple (several arguments) or a mapping (named arguments) is one batch of inputs. A dataset or
    another iterable, such as a DataLoader or a list, is a loader of inputs, or of pairs whose targets are skipped; it
    is to the batches of a loader that ``batch_fn`` is applied.
    """
    one = is_array(x) or isinstance(x, (tuple, Mapping))
    x = inputs_of(x, None, network.input_signature) if isinstance(x, Mapping) else x  # may hold targets too
    if not one and not isinstance(x, (Iterable, Dataset)):
        msg = f"Inputs must be a tensor, an array, a tuple, a mapping or a loader of these, not {type(x).__name__}."
        raise DataError(msg)
    size, empty = max(1, _EXAMPLES_TIMES_SAMPLES.get(network.device.type, 8192) // max(1, n_samples)), True
    loader = [x] if one else as_loader(x)
    batch_fn = batch_fn_for(loader, batch_fn)
    check_order(loader, "Predictions come in the order of the inputs, one for each")
    for batch in loader:
        inputs = batch if one else inputs_of(batch, batch_fn, network.input_signature)
        check_columns(inputs, network.input_signature)
        inputs = as_tensors(inputs, network.dtype)
        for leaf in leaves(inputs):
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                msg = f"The inputs hold NaN or Inf{first_bad(leaf)}. Leave such inputs out, or replace the numbers."
                raise DataError(msg)
        total = n_examples(inputs)
        network.check_form(inputs)
        for start in range(0, total, size):
            yield to_device(take_examples(inputs, start, start + size), network.device)
            empty = False
    if empty:
        msg = "There is nothing to predict: the loader yields no batch, or only empty ones."
        raise DataError(msg)


class Masks:
    """Which positions of the inputs count, collected batch by batch.

    ``mask`` is True where a position counts: a tensor or array (N, ...), or a function of the inputs. None means the
    ``attention_mask`` of the inputs if it has the shape of the positions; "all" means every position.
    """

    def __init__(self, likelihood: Likelihood, mask: Mask) -> None:
        mask = as_tensors(mask, None) if is_array(mask) else mask
        if not (
            mask is None or isinstance(mask, Tensor) or callable(mask) or (isinstance(mask, str) and mask == "all")
        ):
            what = repr(mask) if isinstance(mask, str) else f"a {type(mask).__name__}"
            msg = f'mask must be a tensor or an array, a function of the inputs, "all" or None, not {what}.'
            raise DataError(msg)
        self._likelihood, self._mask = likelihood, mask
        self._found = list[Tensor | None]()

    def look(self, inputs: Any, outputs: Tensor) -> None:
        """Record the mask of a batch."""
        found, shape = None, self._likelihood.positions(outputs)
        if callable(self._mask):
            given = self._mask(inputs)
            found = _fitted(as_tensors(given, None) if is_array(given) else given, shape).to(outputs.device)
        elif self._mask is None and isinstance(inputs, Mapping):
            own = inputs.get("attention_mask")
            if isinstance(own, Tensor) and 1 < own.ndim <= len(shape) and tuple(own.shape) == shape[: own.ndim]:
                found = _fitted(own, shape)
        self._found.append(found)

    def joined(self, outputs: Tensor) -> Tensor | None:  # (N, ...) -> bool (N, ...)
        """Return the mask of all inputs, in the shape of their positions; None if all positions count."""
        if isinstance(self._mask, Tensor):
            return _fitted(self._mask.to(outputs.device), self._likelihood.positions(outputs))
        masks = [mask for mask in self._found if mask is not None]
        return torch.cat(masks) if masks and len(masks) == len(self._found) else None


def _fitted(mask: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a mask in the shape of the positions; it is expanded over the last dimensions if it lacks them."""
    given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if len(shape) == 1:
        msg = "A mask says which positions count, but here each input has one prediction: leave mask out."
        raise DataError(msg)
    if not isinstance(mask, Tensor) or mask.ndim < 2 or given != shape[: mask.ndim]:
        msg = f"The mask must be a tensor of the shape of the positions, {shape}, not {given}."
        raise DataError(msg)
    return mask.bool().reshape(*mask.shape, *(1 for _ in shape[mask.ndim :])).expand(shape)


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
    """Predict for inputs or a loader of inputs, with one sample per direction divided by ``root``."""
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
    """Concatenate the outputs of several batches."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        named = " and ".join(str(("n", *shape)) for shape in sorted(shapes))
        msg = f"The batches give outputs of shapes {named}: pad them to one length, or predict batch by batch."
        raise DataError(msg)
    return torch.cat(parts)


def default_link(pred_type: str) -> str:
    """Return the default way to average probabilities."""
    return "margin" if pred_type == "linearized" else "mc"


def _in_halves(network: Network, x: Any, directions: Tensor, pred_type: str, root: float) -> tuple[Tensor, Tensor]:
    """Call `sample_outputs`, with half of the inputs at a time if memory runs out."""
    size = n_examples(x)
    found = network.group.attempt(partial(sample_outputs, network, x, directions, pred_type, root))
    if not isinstance(found, OutOfMemory):
        return found
    if size == 1:
        raise found.error
    halves = (take_examples(x, 0, size // 2), take_examples(x, size // 2, size))
    (first, a), (second, b) = (_in_halves(network, half, directions, pred_type, root) for half in halves)
    return torch.cat([first, second]), torch.cat([a, b], dim=1)


def summarize(
    mean: Tensor, changes: Tensor, likelihood: Likelihood, link: str, mask: Tensor | None = None
) -> Prediction:  # (N, ...), (S, N, ...)
    """Return the prediction for mean outputs and the deviations of the samples from them."""
    if link not in LINKS:
        msg = f"link_approx must be one of {', '.join(LINKS)}, not {link!r}."
        raise SettingsError(msg)
    samples = mean + changes
    variance = changes.square().sum(0) / (len(changes) - 1)
    probs = _average(mean, changes, variance, likelihood, link) if likelihood.has_probabilities else None
    if not torch.isfinite(mean).all():
        wrong = (~torch.isfinite(mean)).flatten(1).any(1).nonzero()[:, 0]
        message = (
            f"The network itself answers NaN or Inf for {len(wrong):,} of {len(mean):,} inputs, the first is "
            f"input {int(wrong[0])}: is it all padding (attention_mask 0 everywhere), or does it hold extreme values? "
            "Its prediction means nothing: leave it out."
        )
        warn(message)
    elif not torch.isfinite(variance).all():
        message = (
            f"Some predictions or their variances are not finite in {str(samples.dtype).removeprefix('torch.')}: use a "
            "larger prior_precision, or scale the outputs."
        )
        warn(message)
    noise = likelihood.noise_variance(mean)
    return Prediction(mean, variance, probs, samples, noise, mask, likelihood.name)


def _average(mean: Tensor, changes: Tensor, variance: Tensor, likelihood: Likelihood, link: str) -> Tensor:
    """Return the probabilities, averaged over the posterior as ``link`` says."""
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
    """Return the mean negative log predictive density per target, from mean outputs and centred deviations.

    ``changes=None`` means the network itself. A ``link`` other than "mc" means the closed form, if there is one.
    """
    if changes is None:
        values = likelihood.nll(outputs, targets)
    elif link == "mc" or not likelihood.has_closed_form:
        each = torch.stack([likelihood.nll(outputs + change, targets) for change in changes])
        values = math.log(len(changes)) - torch.logsumexp(-each, 0)
    else:
        values = likelihood.nll(outputs, targets, likelihood.link_variance(outputs, changes))
    return float(values.sum()) / max(1, likelihood.n_targets(outputs, targets))
