"""Samples, their predictions, and how far predictions moved from the network's own on data with targets.

The functions with an argument ``self`` are methods of :class:`SamplePosterior`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes import predictive
from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.batches import BatchFn, take_examples, to_device
from nullbayes.jacobian.data import check_batch
from nullbayes.jacobian.loaders import batches
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.arguments import whole
from nullbayes.posteriors.measure import worst_ratio
from nullbayes.posteriors.measured import FitCheck
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Prediction, centred, joined, nll, summarize

AT_ONCE = 1024  # examples
CHUNK = 8192  # examples times samples in memory at a time


def pieces(
    network: Network, batch_fn: BatchFn | None, data: Any, size: int = AT_ONCE
) -> Iterator[tuple[Any, Tensor]]:  # inputs and targets
    """Iterate once over inputs and targets on the network's device, at most ``size`` examples at a time."""
    network.check_unchanged()
    empty = True
    for number, (x, y) in enumerate(batches(data, batch_fn, network.dtype, network.input_signature)):
        check_batch(number, x, y)
        network.check_form(x)
        empty = False
        for start in range(0, len(y), size):
            piece = take_examples(x, start, start + size), y[start : start + size]
            moved: tuple[Any, Tensor] = to_device(piece, network.device)
            yield moved
    if empty:
        msg = "The loader is empty: it yields no batch."
        raise DataError(msg)


def evaluate(
    network: Network, likelihood: Likelihood, parts: Iterable[tuple[Any, Tensor]], directions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the network's outputs (N, ...), the centred changes by directions (S, N, ...), and the targets."""
    outputs, changes, targets = [], [], []
    with network.group.together():
        for x, y in parts:
            own, change = linearized(network, x, directions)
            likelihood.check(own, y)
            outputs.append(own)
            changes.append(centred(change))
            targets.append(y)
    return joined(outputs), torch.cat(changes, dim=1), torch.cat(targets)


@full_precision()
def check_fit(self: Any, loader: Any, targets: Any = None) -> FitCheck:
    """Measure how far predictions, their likelihood and accuracy moved from the network's own on some data.

    Parameters
    ----------
    loader, targets : iterable of batches, or inputs and targets
        The data, in any order: ``check_fit(loader)`` or ``check_fit(x, y)``.

    Returns
    -------
    FitCheck
        The distances, at the prior precision in use.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> check = posterior.check_fit(x[:2], y[:2])
    >>> abs(check.nll_posterior - check.nll_model) < 1e-3
    True
    """
    outputs, changes, labels = self._evaluate(loader if targets is None else (loader, targets))
    return _compared(self._likelihood, outputs, changes / self.prior_precision**0.5, labels, self._link)


def _compared(
    likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor, link: str
) -> FitCheck:  # (N, ...), (S, N, ...)
    """Compare the predictions of samples, given by their changes of the outputs, with the network's own."""
    counted = counted_outputs(likelihood, outputs, targets)
    shift = changes.mean(0)[counted]
    mean, changes = outputs + changes.mean(0), centred(changes)
    found, ratio = None, None
    if likelihood.has_probabilities:
        found = summarize(mean, changes, likelihood, link).probs
    if outputs.ndim == 2 and outputs.shape[1] > 1 and likelihood.independent_outputs:
        ratio = worst_ratio(changes.var(0).mean(0).sqrt(), outputs.std(0, unbiased=False))
    own = None if found is None else likelihood.accuracy(likelihood.probabilities(outputs), targets)
    return FitCheck(
        n_data=len(outputs),
        mean_shift=float(shift.square().mean().sqrt()),
        max_shift=float(shift.abs().max()),
        std=float(changes.var(0)[counted].mean().sqrt()),
        output_std=likelihood.spread(outputs, targets),
        worst_ratio=ratio,
        nll_model=nll(likelihood, outputs, None, targets),
        nll_posterior=nll(likelihood, mean, changes, targets, link),
        accuracy_model=own,
        accuracy_posterior=None if found is None else likelihood.accuracy(found, targets),
        temperature=likelihood.temperature,
        nll_untempered=nll(
            likelihood if likelihood.temperature == 1.0 else likelihood.tempered(1.0), outputs, None, targets
        ),
    )


def counted_outputs(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:  # bool (N, ...)
    """Return which outputs the targets speak of; refuse targets of which every one is ignored."""
    counted = likelihood.counted(outputs, targets)
    counted = torch.ones_like(outputs, dtype=torch.bool) if counted is None else counted
    if not bool(counted.any()):
        msg = "Every target is one to be ignored (ignore_index): there is nothing to compare predictions with."
        raise DataError(msg)
    return counted


def predict(
    self: Any,
    x: Any,
    *,
    pred_type: str = "linearized",
    n_samples: int | None = None,
    link_approx: str | None = None,
    mask: Mask = None,
) -> Prediction:
    """Predict for inputs, or for a loader of them.

    Parameters
    ----------
    x : Tensor, array, tuple, mapping, dataset or loader
        What the model takes: one argument, several, or named ones; or an iterable of such (targets in pairs are
        ignored). A loader that shuffles or drops examples is refused: answers come in the order of the inputs.
    pred_type : "linearized" or "sampled"
        The linearized network, for which the theory holds, or the network at the sampled parameters.
    n_samples : int, optional
        Use only the first so many samples.
    link_approx : "margin", "probit", "bridge" or "mc", optional
        How probabilities are averaged over the posterior. "margin", the default for linearized predictions, shrinks
        the distance of each logit to that of the predicted class by its variance: no Monte Carlo noise, and the
        predicted class is always the network's. "probit" shrinks each logit by its own variance and "bridge" is the
        Laplace bridge, both as in laplace-torch; "mc" is the mean of the samples' probabilities, the default for
        sampled predictions. For binary and multilabel likelihoods "margin" and "probit" are the same.
    mask : Tensor (N, ...), callable (inputs) -> Tensor, or "all", optional
        True at the positions of outputs such as (N, T, C) that count; padding does not, and scores leave it out. By
        default an input's own ``attention_mask``, if it has one; "all" counts everything.

    Returns
    -------
    Prediction
        Mean, variance and samples of the outputs in the shape in which the model returns them, and probabilities where
        the likelihood has them.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> prediction = posterior.predict(x)
    >>> prediction.samples.shape, torch.equal(prediction.mean, model(x))
    (torch.Size([10, 4, 1]), True)
    >>> (prediction.std.flatten() > 1e-3).tolist()
    [False, False, True, True]
    """
    found: Prediction = self._predict(x, pred_type=pred_type, n_samples=n_samples, link_approx=link_approx, mask=mask)
    return found.reshaped(self._network.as_returned)


@full_precision()
def predict_outputs(
    self: Any,
    x: Any,
    *,
    pred_type: str = "linearized",
    n_samples: Any = None,
    link_approx: Any = None,
    mask: Mask = None,
) -> Prediction:
    """Predict with a dimension for the outputs, (N, 1), also where the model returns one number per input."""
    self._network.check_unchanged()
    options = {"pred_type": pred_type, "link": link_approx, "batch_fn": self._batch_fn, "mask": mask}
    root, network = self.prior_precision**0.5, self._network
    with network.group.together():
        return predictive.predict(network, self._likelihood, x, self._first(n_samples), root=root, **options)


@contextlib.contextmanager
def sampled_parameters(self: Any, i: int) -> Iterator[nn.Module]:
    """Put a sample into the user's model during a ``with`` block; the trained parameters return after it.

    Parameters
    ----------
    i : int
        The number of the sample, from 0; negative numbers count from the last.

    Yields
    ------
    nn.Module
        The user's own model, with other parameters.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(4, 2, bias=False), torch.eye(4)
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], torch.tensor([0, 1]))
    >>> own = model(x)
    >>> with posterior.sampled_parameters(0) as sampled:
    ...     print(torch.isclose(sampled(x), own, atol=1e-6).all(1))
    tensor([ True,  True, False, False])
    """
    if not -self.n_samples <= whole(i, "i") < self.n_samples:
        msg = f"There is no sample {i}: there are {self.n_samples}."
        raise SettingsError(msg)
    self._network.check_unchanged()
    model, values = self._network.model, self._sampled_tensors(i)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name: named[name].data for name in values}
    try:
        for name, value in values.items():
            named[name].data = value.to(trained[name].dtype, copy=True)
        yield model
    finally:
        for name, value in trained.items():
            named[name].data = value
