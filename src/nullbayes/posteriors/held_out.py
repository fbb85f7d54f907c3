"""What data with targets say about a posterior: how far its predictions moved, and which scale suits them best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes import priors
from nullbayes.errors import DataError, SettingsError, warn
from nullbayes.jacobian.batches import BatchFn, is_array, take_examples, to_device
from nullbayes.jacobian.data import check_batch
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.loaders import batches
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Bernoulli, Likelihood, Regression
from nullbayes.posteriors.measure import worst_ratio
from nullbayes.posteriors.promise import Answers
from nullbayes.predictive import Prediction, centred, joined, nll, summarize

METHODS = ("nll", "grid", "marglik", "closed_form")
GRID = (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)  # of the paper
AT_ONCE = 1024  # examples
_CHUNK = 8192  # examples times samples in memory at a time
_INDIFFERENT, _HARMLESS = 1e-5, 1e-3  # nats of held-out likelihood: of the mean, and with its error added
_TEMPERATURES, _NOISES = (0.05, 20.0), (1e-10, 1e10)  # the range of temperature scaling, for logits and for noise
_AROUND = 2.0  # the factor around that temperature that is searched together with a variance


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


def check_fit(
    likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor, link: str
) -> FitCheck:  # (N, ...), (S, N, ...)
    """Compare the predictions of samples, given by their changes of the outputs, with the network's own."""
    counted = _counted(likelihood, outputs, targets)
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


def _counted(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:  # bool (N, ...)
    counted = likelihood.counted(outputs, targets)
    counted = torch.ones_like(outputs, dtype=torch.bool) if counted is None else counted
    if not bool(counted.any()):
        msg = "Every target is one to be ignored (ignore_index): there is nothing to compare predictions with."
        raise DataError(msg)
    return counted


def check_method(loader: Any, method: str) -> str:
    """Return the name of a method that chooses a precision, or refuse one that is unknown or lacks its data."""
    if is_array(method):
        msg = "Inputs and targets are passed as one pair here: optimize_prior_precision((x, y))."
        raise SettingsError(msg)
    if method not in METHODS:
        msg = f"method must be one of {', '.join(METHODS)}, not {method!r}."
        raise SettingsError(msg)
    if loader is None and method in ("nll", "grid"):
        msg = f"method={method!r} needs held-out data: optimize_prior_precision(held_out, {method!r})."
        raise SettingsError(msg)
    return method


def best_evidence(network: Network, likelihood: Likelihood, batch_fn: BatchFn | None, loader: Any) -> float:
    """Return the precision of the largest marginal likelihood of linearized Laplace on the training data."""
    if loader is None:
        msg = 'method="marglik" reads the training data: pass them, optimize_prior_precision(loader, "marglik").'
        raise SettingsError(msg)
    network.check_unchanged()
    rows = OutputJacobian(network, loader, likelihood, hessian=True, batch_fn=batch_fn)
    spectrum = priors.spectrum(rows, torch.Generator().manual_seed(0))
    return priors.best_evidence(*spectrum, float(network.theta.double().square().sum()))


def best_of_grid(objective: Callable[[float], float]) -> float:
    """Return the number of the paper's grid at which an objective is largest."""
    values = {alpha: objective(alpha) for alpha in GRID}
    return max(values, key=lambda alpha: values[alpha] if math.isfinite(values[alpha]) else -math.inf)


def answers_on(likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor) -> Answers:
    """Return predictions on held-out data at any precision; refuse data of which every target is ignored."""
    _counted(likelihood, outputs, targets)
    return Answers(likelihood, outputs, changes, targets)


def tuned(found: Answers) -> tuple[float, float]:
    """Return the precision and the temperature of :func:`best_scale`; warn where the data do not determine them."""
    alpha, temperature = best_scale(found)
    if found.likelihood.has_probabilities and temperature < 1.01 * _TEMPERATURES[0]:
        message = (
            "The held-out data do not determine a temperature: their likelihood still rises at the edge of the "
            f"search, at {temperature:.2g}. Are all of them predicted right? Pass more, or set "
            "posterior.temperature = 1.0; otherwise scores of probabilities cannot tell inputs apart."
        )
        warn(message)
    return alpha, temperature


def best_scale(found: Answers) -> tuple[float, float]:
    """Return the precision and the temperature that suit held-out data best together.

    An infinite precision is temperature scaling. A finite precision with a temperature of its own is used where it is
    better by more than three standard errors of the difference. Otherwise the temperature is that of temperature
    scaling, and the precision is the smallest that is harmless: the mean is not worse by more than 1e-5 nats per
    target, nor by more than 1e-3 with two standard errors added.
    """

    def at(alpha: float, low: float, high: float) -> tuple[float, float]:
        """Return the least negative log-likelihood at a precision, and its temperature between two others."""
        if not found.likelihood.has_closed_form:
            return found.nll(alpha), 1.0
        t = math.exp(_golden(lambda log_t: found.tempered(math.exp(log_t)).nll(alpha), math.log(low), math.log(high)))
        return found.tempered(t).nll(alpha), t

    limits = _NOISES if isinstance(found.likelihood, Regression) else _TEMPERATURES
    _, t = min(at(math.inf, *limits), (found.nll(math.inf), found.likelihood.temperature))
    if not found.std > 0.0:
        return 1.0, t
    bounds, scaled = (t / _AROUND, t * _AROUND), found if found.likelihood.temperature == t else found.tempered(t)
    grid = [math.log(found.std**2) + math.log(4.0) * j for j in range(-8, 17)]
    values = [at(math.exp(point), *bounds)[0] for point in grid]
    best = min(range(len(grid)), key=lambda j: values[j] if math.isfinite(values[j]) else math.inf)
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    alpha = math.exp(_golden(lambda point: at(math.exp(point), *bounds)[0], low, high))
    own = at(alpha, *bounds)[1]
    other = found if own == found.likelihood.temperature else found.tempered(own)
    gain = scaled.each_nll(math.inf) - other.each_nll(alpha)
    if float(gain.mean()) > 3.0 * float(gain.std()) / math.sqrt(len(gain)):
        return alpha, own
    alpha, each, per = math.exp(grid[-1]), scaled.each_nll(math.inf), len(gain) / found.n_targets
    while alpha > math.exp(grid[0]):
        loss = (scaled.each_nll(alpha / 2.0) - each) * per
        error = float(loss.std()) / math.sqrt(len(loss))
        if not (float(loss.mean()) <= _INDIFFERENT and float(loss.mean()) + 2.0 * error <= _HARMLESS):
            break
        alpha /= 2.0
    return alpha, t


def _golden(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a function with one valley between two numbers, to about 1e-3."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-3:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return 0.5 * (low + high)
