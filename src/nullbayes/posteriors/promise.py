r"""The promise as a number: the smallest prior precision at which a posterior predicts as well as its network.

A projected posterior hardly moves on the examples whose rows were projected out, whatever the precision is; on similar
inputs it does. So the default precision is measured on both. A *trial* projects out the rows of some training examples
and is judged on others, which it keeps apart; the fit itself is judged on training examples. On each, the precision is
raised until the mean negative log-likelihood per target is at most :data:`NATS` above the network's own, and the
accuracy at most :data:`POINTS` below it. The rows of the trial are a part of those of the fit, so its null space
contains theirs and its variances are no smaller: the precision that the trial asks for is on the safe side.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.products import centred, linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.header import Amount, Count

NATS = 3e-3  # by which the negative log-likelihood of a target may rise
POINTS = 1e-3  # by which the share of right answers may fall
SAMPLES = 30  # of a trial, however many the fit has
_MOST = 1000  # examples whose rows a trial takes, and as many that it keeps apart
_FEWEST = 100  # examples to keep apart, where there are twice as many
_TRIAL_SHARE, _APART_SHARE = 5, 10  # one in so many examples
_FOLDS = 5  # trials, where examples are few
_TRIAL_ROWS, _CHEAP_ROWS = 5_000, 1_600  # rows that a trial has at most, and rows that cost next to nothing
_NUMBERS = 2**20  # outputs that are evaluated at most
_ON_HOST = 2**17  # outputs up to which a search is faster on the host, because its steps are many and small
_VISIBLE = 1e-3  # of the spread of the outputs
_ROUNDING = 8.0  # eps of the outputs


@dataclass(frozen=True)
class Promise:
    """The measurements that the default prior precision is chosen by.

    Attributes
    ----------
    n_apart, n_trial : int
        Training examples that the trial kept apart, and those whose rows it projected out. Where data are few, there
        are several trials, and every example is kept apart once.
    needed_apart, needed_inside : float
        The least precision that the examples kept apart require, and the least that the fit's own examples require.
    decided_by : str
        "nll" or "accuracy", whichever requires the larger of the two; "nothing" where any precision would do.
    apart_std : float
        Root mean square standard deviation of the outputs of the examples kept apart, at a precision of 1.
    nll_network, nll_posterior : float
        Per target, on the fit's own examples, at the precision that was chosen.
    accuracy_network, accuracy_posterior : float or None
        On the same examples, for likelihoods with classes.
    """

    n_apart: Count
    n_trial: Count
    needed_apart: Amount
    needed_inside: Amount
    decided_by: str
    apart_std: Amount
    nll_network: float = math.nan
    nll_posterior: float = math.nan
    accuracy_network: Amount | None = None
    accuracy_posterior: Amount | None = None

    @property
    def needed(self) -> float:
        """The least precision that keeps the promise."""
        return max(self.needed_apart, self.needed_inside)

    @property
    def kept(self) -> bool:
        """Whether the posterior predicts the fit's own examples as well as the network, at the precision chosen."""
        worse = not self.nll_posterior - self.nll_network <= NATS + 1e-6 * abs(self.nll_network)  # NaN is worse
        if self.accuracy_network is None or self.accuracy_posterior is None:
            return not worse
        return not worse and self.accuracy_posterior >= self.accuracy_network - POINTS - 1e-9

    def visible(self, alpha: float, output_std: float) -> bool:
        """Return whether inputs like the training data have a noticeable standard deviation at a precision."""
        return self.apart_std / math.sqrt(alpha) >= _VISIBLE * output_std


class ScaledPredictions:
    """A network's outputs (n, ...) on some examples, their targets, and the centred changes (S, n, ...) by samples.

    The samples have a prior precision of 1; predictions are evaluated at any other.
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
        self.std = 0.0 if self.std <= rounding else self.std  # a change within rounding means nothing
        self._counts = bool(seen.numel())
        self._closed = likelihood.has_closed_form
        self._spread = likelihood.link_variance(outputs, changes) if self._closed else changes
        if self._closed and outputs.numel() <= _ON_HOST:
            self.outputs, self.targets, self._spread = outputs.cpu(), targets.cpu(), self._spread.cpu()

    def nll(self, alpha: float) -> float:
        """Return the negative log-likelihood per target at a precision; infinity stands for the network itself."""
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
        """Return the rise of the negative log-likelihood per target; of several outputs, the largest."""
        own = self.likelihood.nll_terms(self.outputs, self.targets)
        if own.ndim != 2 or own.shape[1] == 1 or not self._closed:
            return self.nll(alpha) - self.nll(math.inf)
        return float((self.likelihood.nll_terms(self.outputs, self.targets, self._spread / alpha) - own).mean(0).max())

    def tempered(self, temperature: float) -> ScaledPredictions:
        """Return the same predictions at another temperature."""
        other = copy.copy(self)
        other.likelihood = self.likelihood.tempered(temperature)
        return other

    def accuracy(self, alpha: float) -> float | None:
        """Return the share of right classes at a precision; None for likelihoods without classes."""
        if not (self.likelihood.has_probabilities and self._counts):
            return None
        variance = None if math.isinf(alpha) else self._spread / alpha
        return self.likelihood.accuracy(self.likelihood.probabilities(self.outputs, variance), self.targets)


def answers(rows: JacobianRows, looks: Iterable[tuple[Examples, Tensor]]) -> ScaledPredictions:
    """Evaluate the network, and directions (S, P) around it, on some examples of the rows."""
    outputs, changes, targets = list[Tensor](), list[Tensor](), list[Tensor]()
    for examples, directions in looks:
        for start, stop in examples.ranges(rows.examples_within(len(directions))):
            x, y = examples.read(start, stop)
            own, change = linearized(rows.network, x, directions)
            outputs.append(own)
            changes.append(centred(change))
            targets.append(y)
    if (group := rows.examples.group).size > 1:  # a process may have none of the examples
        lists = group.gather([[part.cpu() for part in parts] for parts in (outputs, changes, targets)])
        outputs, changes, targets = ([p.to(rows.device) for some in lists for p in some[i]] for i in range(3))
    return ScaledPredictions(rows.likelihood, torch.cat(outputs), torch.cat(changes, dim=1), torch.cat(targets))


def least_precision(found: ScaledPredictions) -> tuple[float, str]:
    """Return the least precision at which predictions are as good as the network's, and what it has to keep.

    The search goes from a harmless precision downwards, by factors of four, until one fails, and then between the last
    two. It returns 0 and "nothing" where none fails.
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

    ``closed`` is the precision that is used where the promise does not require a larger one.
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
        new,
        nll_network=seen.nll(math.inf),
        nll_posterior=seen.nll(alpha),
        accuracy_network=seen.accuracy(math.inf),
        accuracy_posterior=seen.accuracy(alpha),
    )


def split(rows: JacobianRows, seed: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return for each trial the examples whose rows it takes and those that it keeps apart, in ascending order.

    The seed decides which. Where examples are few, each of them is kept apart once, in one of several trials.
    """
    n, width = rows.examples.n_all, max(1, rows.n_outputs)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    cheap, most = (max(1, size // rows.rows_per_example) for size in (_CHEAP_ROWS, _TRIAL_ROWS))
    if n <= 2 * _FEWEST and n * width <= _NUMBERS:
        apart = [order[fold::_FOLDS] for fold in range(min(_FOLDS, n))]
        return [(sorted([i for i in order if i not in out][:most]), sorted(out)) for out in map(set, apart)]
    n_apart = max(1, min(_MOST, max(n // _APART_SHARE, min(_FEWEST, n // 2)), _NUMBERS // width))
    n_inside = min(_MOST, max(n // _TRIAL_SHARE, cheap), n - n_apart, most)
    return [(sorted(order[n_apart : n_apart + n_inside]), sorted(order[:n_apart]))]
