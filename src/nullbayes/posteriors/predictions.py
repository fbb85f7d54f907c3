"""Predictions and scores of samples, and how far predictions moved from the network's own on data with targets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes import predictive
from nullbayes.errors import DataError, SettingsError, warn
from nullbayes.jacobian.batches import BatchFn, is_array, take_examples, to_device
from nullbayes.jacobian.data import check_batch
from nullbayes.jacobian.loaders import batches
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Bernoulli, Likelihood, Regression
from nullbayes.posteriors.measure import worst_ratio
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Prediction, centred, joined, nll, stream, summarize

AT_ONCE = 1024  # examples
_CHUNK = 8192  # examples times samples in memory at a time


@dataclass(frozen=True)
class FitCheck:
    """How far a posterior's predictions moved from the network's own on some data.

    Attributes
    ----------
    n_data : int
        Examples checked.
    mean_shift, max_shift : float
        Root mean square and largest distance of the mean outputs from the network's, in units of the outputs. They are
        zero up to rounding for linearized predictions, whose mean is the network's output.
    std : float
        Root mean square standard deviation of the outputs.
    output_std : float
        The spread of the network's own outputs, to compare these with.
    worst_ratio : float or None
        The largest ratio of the standard deviation of an output to its spread, for several outputs with units of
        their own.
    nll_model, nll_posterior : float
        Negative log-likelihood per target, of the network and of the posterior's prediction.
    accuracy_model, accuracy_posterior : float or None
        Share of right classes (or right labels); None for likelihoods without classes.
    """

    n_data: int
    mean_shift: float
    max_shift: float
    std: float
    output_std: float
    worst_ratio: float | None
    nll_model: float
    nll_posterior: float
    accuracy_model: float | None
    accuracy_posterior: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Lay the check out as a table."""
        lines = [
            f"{self.n_data:,} examples; outputs spread by {self.output_std:.3g}",
            f"mean outputs moved by {self.mean_shift:.2g} (at most {self.max_shift:.2g}), "
            f"standard deviation {self.std:.2g}",
            f"nll      {self.nll_model:.4f} -> {self.nll_posterior:.4f}",
        ]
        if self.accuracy_model is not None and self.accuracy_posterior is not None:
            lines.append(f"accuracy {self.accuracy_model:.4f} -> {self.accuracy_posterior:.4f}")
        return "\n".join(lines)


def pieces(
    network: Network, batch_fn: BatchFn | None, data: Any, size: int = AT_ONCE
) -> Iterator[tuple[Any, Tensor]]:  # inputs and targets
    """Iterate once over inputs and targets on the network's device, at most ``size`` examples at a time."""
    network.check_unchanged()
    empty = True
    for number, (x, y) in enumerate(batches(data, batch_fn, network.dtype)):
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
    network: Network, likelihood: Likelihood, batch_fn: BatchFn | None, data: Any, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the network's outputs (N, ...), the centred changes by directions (S, N, ...), and the targets."""
    outputs, changes, targets = [], [], []
    for x, y in pieces(network, batch_fn, data, max(1, _CHUNK // len(directions))):
        own, change = linearized(network, x, directions)
        likelihood.check(own, y)
        outputs.append(own)
        changes.append(centred(change))
        targets.append(y)
    return joined(outputs), torch.cat(changes, dim=1), torch.cat(targets)


def check_fit(
    likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor, link: str
) -> FitCheck:  # (N, ...), (S, N, ...)
    """Compare the predictions of samples, given by their changes of the outputs, with the network's own."""
    counted = counted_outputs(likelihood, outputs, targets)
    shift = changes.mean(0)[counted]
    mean, changes = outputs + changes.mean(0), centred(changes)
    found, ratio = None, None
    if likelihood.has_probabilities:
        found = summarize(mean, changes, likelihood, link).probs
    if outputs.ndim == 2 and outputs.shape[1] > 1 and isinstance(likelihood, (Bernoulli, Regression)):
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
    )


def counted_outputs(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:  # bool (N, ...)
    """Return which outputs the targets speak of; refuse targets of which every one is ignored."""
    counted = likelihood.counted(outputs, targets)
    counted = torch.ones_like(outputs, dtype=torch.bool) if counted is None else counted
    if not bool(counted.any()):
        msg = "Every target is one to be ignored (ignore_index): there is nothing to compare predictions with."
        raise DataError(msg)
    return counted


@full_precision()
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
    """
    self._network.check_unchanged()
    if n_samples == 1:
        msg = "n_samples must be at least 2 to speak of a variance, not 1; sample(1) gives the parameters of one."
        raise SettingsError(msg)
    options = {"pred_type": pred_type, "link": link_approx, "batch_fn": self._batch_fn, "mask": mask}
    root = self.prior_precision**0.5
    return predictive.predict(self._network, self._likelihood, x, self._first(n_samples), root=root, **options)


def ood_score(
    self: Any,
    x: Any,
    kind: str = "max_variance",
    *,
    per: str = "input",
    mask: Mask = None,
    pred_type: str = "linearized",
) -> Tensor:  # (N,) or (N, ...)
    """Return one score per input; higher means that the input is less like the training data.

    Parameters
    ----------
    x, mask, pred_type
        As for :meth:`predict`.
    kind : str
        "max_variance" (over the outputs), "sum_variance", "max_prob_variance", "entropy" or "mutual_information".
        Variances of a regression with several outputs are relative to the noise of each.
    per : "input" or "position"
        Where outputs have positions (tokens, pixels), the score of an input is the largest of its positions for the
        kinds that begin with "max", and their mean for the others; masked positions do not count. "position" gives
        the score of each position, NaN where it is masked.
    """
    at_once = is_array(x) or isinstance(x, (tuple, Mapping)) or is_array(mask) or per != "input"
    pieces = [x] if at_once else stream(x, self._network, self._batch_fn, self.n_samples)  # lengths may differ
    scores = [self._scored(self.predict(piece, pred_type=pred_type, mask=mask), kind, per, mask) for piece in pieces]
    return torch.cat(scores)


def warn_of_padding(likelihood: Likelihood, prediction: Prediction) -> None:
    """Warn that padding may be part of the scores of a prediction with positions."""
    if len(likelihood.positions(prediction.mean)) < 2:
        return
    if likelihood.some_ignored and prediction.mask is None:
        message = (
            "Training targets ignored some positions (padding?), but these inputs come without a mask, so every "
            "position counts in their scores."
        )
    elif likelihood.more_ignored:
        message = (
            "Training targets ignored positions that attention_mask counts (special tokens, parts of words?). Nothing "
            "holds the outputs there, and they count in these scores."
        )
    else:
        return
    warn(f'{message} Pass mask=..., true where a position counts, or mask="all".')


@contextlib.contextmanager
def replaced(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Put other values into a model's parameters and buffers during a ``with`` block."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name: named[name].data for name in values}
    try:
        for name, value in values.items():
            named[name].data = value.to(trained[name].dtype, copy=True)
        yield model
    finally:
        for name, value in trained.items():
            named[name].data = value
