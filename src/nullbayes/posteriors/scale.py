"""The scale of a posterior: its prior precision and temperature, chosen together by held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nullbayes.decisions import watched
from nullbayes.errors import warn
from nullbayes.likelihoods import Regression
from nullbayes.posteriors.best_precision import CONFIDENT, answers_on, golden_section
from nullbayes.posteriors.best_precision import optimize_prior_precision as optimize_prior_precision
from nullbayes.posteriors.promise import ScaledPredictions
from nullbayes.precision import full_precision

_INDIFFERENT, _HARMLESS = 1e-5, 1e-3  # nats of held-out likelihood: of the mean, and with its error added
_TEMPERATURES, _NOISES = (0.05, 20.0), (1e-10, 1e10)  # the range of temperature scaling, for logits and for noise
_FEW, _UNSURE = 50, 2.0  # examples, and the factor by which the temperature that they give may be uncertain
_AROUND = 2.0  # the factor around that temperature that is searched together with a variance
P = TypeVar("P")


@full_precision()
def tune(self: P, loader: Any, targets: Any = None) -> P:
    """Choose the prior precision and the temperature together, by the likelihood of held-out data.

    An infinite precision is temperature scaling, so on these data the result is no worse than temperature scaling,
    nor than the network itself, by more than 1e-5 nats per target. The variance is used as far as it helps by more
    than three standard errors; where it does not, it is kept as large as is harmless, so that scores still tell
    inputs apart.

    Parameters
    ----------
    loader, targets : iterable of batches, or inputs and targets
        Data that the network was not trained on, in any order; a thousand examples are plenty.

    Returns
    -------
    ProjectedPosterior
        The posterior itself, with other ``prior_precision`` and ``temperature``.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> x_held = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    >>> posterior = posterior.tune(x_held, x_held.sum(1, keepdim=True))
    >>> posterior.temperature > 0, posterior.prior_precision > 0
    (True, True)
    """
    posterior: Any = self
    evaluated = posterior._evaluate(loader if targets is None else (loader, targets), CONFIDENT)
    alpha, posterior.temperature = tuned(answers_on(posterior._likelihood, *evaluated))
    posterior._precision = posterior._precision_rule = alpha  # a new fit goes by the rule that was given
    return self


def noted(posterior: Any, pieces: Iterable[Any], purpose: str) -> Iterator[Any]:
    """Pass on held-out data that choose a scale, and remember which inputs they have: these should not calibrate."""
    sums: list[Tensor] = []
    yield from watched(pieces, posterior._familiar, purpose, sums)
    if sums:
        posterior._familiar = replace(posterior._familiar, tuned=torch.cat(sums))


def tuned(found: ScaledPredictions) -> tuple[float, float]:
    """Return the precision and the temperature of :func:`best_scale`; warn where the data do not determine them."""
    alpha, temperature = best_scale(found)
    bounded = found.likelihood.has_probabilities
    if bounded and temperature < 1.01 * _TEMPERATURES[0]:
        message = (
            "The held-out data do not determine a temperature: their likelihood still rises at the edge of the "
            f"search, at {temperature:.2g}. Are all of them predicted right? Pass more, or set "
            "posterior.temperature = 1.0; otherwise scores of probabilities cannot tell inputs apart."
        )
        warn(message)
    elif bounded and temperature > _TEMPERATURES[1] / _AROUND / 1.01:  # with a variance, half of the edge
        message = (
            f"The temperature is very high, {temperature:.3g}: on the held-out data the network is hardly better than "
            "a guess, or far too sure of itself. Are they like the training data, with "
            "inputs prepared and classes numbered in the same way? If the logits are just large, divide them: "
            "output_fn=lambda logits: logits / 100."
        )
        warn(message)
    elif (factor := _uncertainty(found, alpha, temperature)) > _UNSURE:
        message = (
            f"The {len(found.outputs)} held-out examples leave the temperature uncertain: it is {temperature:.3g}, "
            f"times or divided by {factor:.2g}. Pass more (a thousand are plenty), or set posterior.temperature = 1.0."
        )
        warn(message)
    return alpha, temperature


def _uncertainty(found: ScaledPredictions, alpha: float, temperature: float) -> float:
    """Return the factor that two standard errors of a temperature are, where examples are few; 1 where they are not.

    Slope and curvature of the likelihood of each example give the error. Where examples are many and the curvature is
    small, the temperature matters little.
    """
    if not found.likelihood.has_closed_form or len(found.outputs) >= _FEW:
        return 1.0
    step = 0.1
    below, here, above = (found.tempered(temperature * math.exp(s)).each_nll(alpha) for s in (-step, 0.0, step))
    slope, bend = (above - below) / (2.0 * step), float((above + below - 2.0 * here).mean()) / step**2
    if len(slope) < 2 or not bend > 0.0:
        return math.inf
    return math.exp(min(2.0 * float(slope.std()) / bend / math.sqrt(len(slope)), 700.0))


def best_scale(found: ScaledPredictions) -> tuple[float, float]:
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
        edges = math.log(low), math.log(high)
        t = math.exp(golden_section(lambda point: found.tempered(math.exp(point)).nll(alpha), *edges))
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
    alpha = math.exp(golden_section(lambda point: at(math.exp(point), *bounds)[0], low, high))
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
