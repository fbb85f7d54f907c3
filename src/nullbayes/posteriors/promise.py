r"""The promise, as a number: the smallest prior precision at which a posterior predicts as well as its network.

On the examples whose rows were projected out, a projected posterior hardly moves, whatever the precision is; on inputs
like them it does. So the default precision is measured on both. A *trial* projects out the rows of some training
examples and looks at others, which it keeps apart; the fit itself is looked at on training examples. On each, the
precision is raised until the mean negative log-likelihood of a target is at most :data:`NATS` above the network's own,
and the accuracy at most :data:`POINTS` below it. The rows of the trial are a part of those of the fit, so its null
space contains theirs and its variances are no smaller: what the trial finds is on the safe side.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Likelihood, Regression
from nullbayes.predictive import centred

NATS = 3e-3  # by which the negative log-likelihood of a target may rise
POINTS = 1e-3  # by which the share of right answers may fall
SAMPLES = 30  # of a trial, however many the fit has
_MOST = 1000  # examples whose rows a trial takes, and as many that it keeps apart
_FEWEST = 100  # examples to keep apart, where there are twice as many
_TRIAL_SHARE, _APART_SHARE = 5, 10  # one in so many examples
_FOLDS = 5  # trials, where examples are few
_TRIAL_ROWS, _CHEAP_ROWS = 5_000, 1_600  # that a trial has at most, and that cost nothing to speak of
_NUMBERS = 2**20  # outputs that are looked at
_ON_HOST = 2**17  # outputs up to which a search is faster on the host: it is many small steps
_VISIBLE = 1e-3  # of the spread of the outputs
_ROUNDING = 8.0  # eps of the outputs
_INDIFFERENT, _HARMLESS = 1e-5, 1e-3  # nats of held-out likelihood: of the mean, and with its error added
TEMPERATURES, _NOISES = (0.05, 20.0), (1e-10, 1e10)  # between which temperature scaling looks, for logits and noise
_AROUND = 2.0  # times less or more than that is tried beside a variance


@dataclass(frozen=True)
class Promise:
    """What the default prior precision was chosen by.

    Attributes
    ----------
    n_apart, n_trial : int
        Training examples that the trial kept apart, and those whose rows it projected out; where data are few, there
        are several trials, and every example is kept apart once.
    needed_apart, needed_inside : float
        The least precision that the examples kept apart ask for, and the least that the fit's own examples ask for.
    decided_by : str
        "nll" or "accuracy": what the larger of the two is there for; "nothing" where any precision would do.
    apart_std : float
        Root mean square standard deviation of the outputs of the examples kept apart, at a precision of 1.
    nll_network, nll_posterior : float
        On the fit's own examples, per target, at the precision that was chosen.
    accuracy_network, accuracy_posterior : float or None
        Likewise.
    """

    n_apart: int
    n_trial: int
    needed_apart: float
    needed_inside: float
    decided_by: str
    apart_std: float
    nll_network: float = math.nan
    nll_posterior: float = math.nan
    accuracy_network: float | None = None
    accuracy_posterior: float | None = None

    @property
    def needed(self) -> float:
        """The least precision that keeps the promise."""
        return max(self.needed_apart, self.needed_inside)

    @property
    def kept(self) -> bool:
        """Whether the fit's own examples are predicted as well as by the network, at the precision that was chosen."""
        worse = not self.nll_posterior - self.nll_network <= NATS + 1e-6 * abs(self.nll_network)  # NaN is worse
        if self.accuracy_network is None or self.accuracy_posterior is None:
            return not worse
        return not worse and self.accuracy_posterior >= self.accuracy_network - POINTS - 1e-9

    def visible(self, alpha: float, output_std: float) -> bool:
        """Return whether inputs like the training data have a standard deviation to speak of at a precision."""
        return self.apart_std / math.sqrt(alpha) >= _VISIBLE * output_std


class Answers:
    """What a network answers on some examples, and how far samples at precision 1 move it.

    Parameters
    ----------
    likelihood : Likelihood
        Of the targets.
    outputs, targets : Tensor (n, ...)
        The network's outputs, and what they should be.
    changes : Tensor (S, n, ...)
        Of the outputs, centred.
    """

    def __init__(self, likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor) -> None:
        self.likelihood, self.outputs, self.targets = likelihood, outputs, targets
        self.n_targets = max(1, likelihood.n_targets(outputs, targets))
        counted, squares = likelihood.counted(outputs, targets), torch.zeros_like(outputs, dtype=torch.float64)
        for change in changes:
            squares += change.double().square() / (len(changes) - 1)
        seen = squares if counted is None else squares[counted]
        self.std = math.sqrt(float(seen.mean())) if seen.numel() else 0.0
        rounding = _ROUNDING * torch.finfo(outputs.dtype).eps * float(outputs.abs().max())
        self.std = 0.0 if self.std <= rounding else self.std  # what rounding moves says nothing
        self._counts = bool(seen.numel())
        self._closed = likelihood.has_closed_form
        self._spread = likelihood.link_variance(outputs, changes) if self._closed else changes
        if self._closed and outputs.numel() <= _ON_HOST:
            self.outputs, self.targets, self._spread = outputs.cpu(), targets.cpu(), self._spread.cpu()

    def nll(self, alpha: float) -> float:
        """Return the negative log-likelihood of a target at a precision; infinity is the network itself."""
        return float(self.each_nll(alpha).sum()) / self.n_targets

    def each_nll(self, alpha: float) -> Tensor:  # (n,)
        """Return the negative log-likelihood of each example at a precision, summed over its targets."""
        if math.isinf(alpha):
            return self.likelihood.nll(self.outputs, self.targets)
        if self._closed:
            return self.likelihood.nll(self.outputs, self.targets, self._spread / alpha)
        root = math.sqrt(alpha)
        each = [self.likelihood.nll(self.outputs + change / root, self.targets) for change in self._spread]
        return math.log(len(each)) - torch.logsumexp(-torch.stack(each), 0)

    def rise(self, alpha: float) -> float:
        """Return by how much the negative log-likelihood of a target rises: of the output where that is most."""
        own = self.likelihood.nll_terms(self.outputs, self.targets)
        if own.ndim != 2 or own.shape[1] == 1 or not self._closed:
            return self.nll(alpha) - self.nll(math.inf)
        return float((self.likelihood.nll_terms(self.outputs, self.targets, self._spread / alpha) - own).mean(0).max())

    def tempered(self, temperature: float) -> Answers:
        """Return the same at another temperature."""
        other = copy.copy(self)
        other.likelihood = self.likelihood.tempered(temperature)
        return other

    def accuracy(self, alpha: float) -> float | None:
        """Return the share of right answers at a precision, where there is such a thing."""
        if not (self.likelihood.has_probabilities and self._counts):
            return None
        variance = None if math.isinf(alpha) else self._spread / alpha
        return self.likelihood.accuracy(self.likelihood.probabilities(self.outputs, variance), self.targets)


def answers(rows: JacobianRows, looks: Iterable[tuple[Examples, Tensor]]) -> Answers:
    """Return the network's answers on some examples of the rows, and how far directions (S, P) move them."""
    outputs, changes, targets = list[Tensor](), list[Tensor](), list[Tensor]()
    for examples, directions in looks:
        for start, stop in examples.ranges(rows.examples_within(len(directions))):
            x, y = examples.read(start, stop)
            own, change = linearized(rows.network, x, directions)
            outputs.append(own)
            changes.append(centred(change))
            targets.append(y)
    return Answers(rows.likelihood, torch.cat(outputs), torch.cat(changes, dim=1), torch.cat(targets))


def least_precision(found: Answers) -> tuple[float, str]:
    """Return the least precision from which on predictions are as good as the network's, and what it is there for.

    Precisions are tried from one that does no harm downwards, by factors of four, until one fails; then between the
    last two. It is 0, for "nothing", where none fails.
    """
    right = found.accuracy(math.inf)

    def fails(alpha: float) -> str:
        if not found.rise(alpha) <= NATS:  # NaN fails
            return "nll"
        now = found.accuracy(alpha)
        return "accuracy" if now is not None and right is not None and now < right - POINTS - 1e-9 else ""

    if not found.std > 0.0:
        return 0.0, "nothing"
    good, by = found.std**2 * 2.0**14, ""
    while fails(good) and good < found.std**2 * 2.0**400:
        good *= 2.0**20
    while not by and good > found.std**2 * 2.0**-40:
        by = fails(good / 4.0)
        good = good if by else good / 4.0
    if not by:
        return 0.0, "nothing"
    bad = good / 4.0
    for _ in range(8):  # to about half a percent
        middle = math.sqrt(good * bad)
        reason = fails(middle)
        good, bad, by = (good, middle, reason) if reason else (middle, bad, by)
    return good, by


def inspected(promise: Promise, rows: JacobianRows, directions: Tensor, closed: float, seed: int) -> Promise:
    """Complete a promise with what the fit's own directions (S, P) do on training examples.

    ``closed`` is the precision that is taken where the promise does not ask for a larger one.
    """
    inside, apart = split(rows, seed)[0]
    most = max(1, min(_MOST, SAMPLES * _NUMBERS // (len(directions) * rows.n_outputs)))
    some = sorted([*apart, *inside][:most])
    seen = answers(rows, [(rows.examples.chosen(some), directions)])
    needed, by = least_precision(seen)
    decided_by = by if needed > promise.needed_apart else promise.decided_by
    new = replace(promise, needed_inside=needed, decided_by=decided_by)
    alpha = max(closed, new.needed)
    return replace(
        new, nll_network=seen.nll(math.inf), nll_posterior=seen.nll(alpha),
        accuracy_network=seen.accuracy(math.inf), accuracy_posterior=seen.accuracy(alpha),
    )  # fmt: skip


def best_scale(found: Answers) -> tuple[float, float]:
    """Return the precision and the temperature that held-out data ask for, together.

    An infinite precision is temperature scaling. A finite one, with a temperature of its own, is taken where it is
    better by more than three standard errors of the difference. Else the temperature is that of temperature scaling,
    and the precision the smallest that the data show to be harmless: the mean is not worse by more than 1e-5 nats per
    target, nor by more than 1e-3 with two standard errors added.
    """

    def at(alpha: float, low: float, high: float) -> tuple[float, float]:
        """Return the least negative log-likelihood at a precision, and its temperature between two others."""
        if not found.likelihood.has_closed_form:
            return found.nll(alpha), 1.0
        t = math.exp(_golden(lambda log_t: found.tempered(math.exp(log_t)).nll(alpha), math.log(low), math.log(high)))
        return found.tempered(t).nll(alpha), t

    limits = _NOISES if isinstance(found.likelihood, Regression) else TEMPERATURES
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
    """Return where a function of one valley between two numbers is least, to about 1e-3."""
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


def split(rows: JacobianRows, seed: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the examples whose rows a trial takes, and those that it keeps apart; by the seed, each in order.

    Where examples are few, every one of them is kept apart once, in one of several trials.
    """
    n, width = len(rows.examples), max(1, rows.n_outputs)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    cheap, most = (max(1, size // rows.rows_per_example) for size in (_CHEAP_ROWS, _TRIAL_ROWS))
    if n <= 2 * _FEWEST and n * width <= _NUMBERS:
        apart = [order[fold::_FOLDS] for fold in range(min(_FOLDS, n))]
        return [(sorted([i for i in order if i not in out][:most]), sorted(out)) for out in map(set, apart)]
    n_apart = max(1, min(_MOST, max(n // _APART_SHARE, min(_FEWEST, n // 2)), _NUMBERS // width))
    n_inside = min(_MOST, max(n // _TRIAL_SHARE, cheap), n - n_apart, most)
    return [(sorted(order[n_apart : n_apart + n_inside]), sorted(order[:n_apart]))]
