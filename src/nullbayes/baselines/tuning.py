"""The prior precision of a baseline: a positive number, given or chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from nullbayes.baselines.method import Method
from nullbayes.errors import NullBayesWarning, SettingsError
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.arguments import positive
from nullbayes.posteriors.best_precision import CONFIDENT as CONFIDENT
from nullbayes.posteriors.best_precision import best_evidence as best_evidence
from nullbayes.posteriors.best_precision import best_of_grid, check_method, maximize
from nullbayes.predictive import Prediction, default_link, nll


def check_prior(name: str, value: Any, *, has_prior: bool) -> float:
    """Return a prior precision as a number; refuse what is none, and any but 1 for a method without a prior."""
    number = None if isinstance(value, str) else positive(value)
    if number is None:
        msg = (
            f"prior_precision of {name} must be a positive number, not {value!r}: "
            "optimize_prior_precision(loader) chooses one after the fit."
        )
        raise SettingsError(msg)
    if not has_prior and number != 1.0:
        msg = f"{name} has no prior: leave prior_precision out."
        raise SettingsError(msg)
    return number


def check_how(name: str, method: Method[Any], loader: Any, how: str) -> str:
    """Return the name of a way to choose the precision; refuse what it lacks, or what the method does not have."""
    if not method.has_prior:
        msg = f"{name} has no prior, so there is no precision to choose."
        raise SettingsError(msg)
    if check_method(loader, how) == "closed_form":
        msg = f'{name} has no closed form of the best precision: use "nll", "grid" or "marglik".'
        raise SettingsError(msg)
    if how == "marglik" and not method.is_laplace:
        msg = f'{name} has no marginal likelihood: use method="grid" or "nll" with held-out data.'
        raise SettingsError(msg)
    return how


def best_by_likelihood(
    how: str,
    pieces: Iterable[tuple[Any, Tensor]],
    likelihood: Likelihood,
    predictor: Callable[[float], Callable[[Any], Prediction]],
    pred_type: str,
) -> float:
    """Return the precision at which the mean prediction of held-out data has the largest log-likelihood.

    ``predictor`` takes a precision and returns a function of inputs. ``how`` is "nll", for all numbers, or "grid", for
    those of the paper.
    """
    chunks, link = list(pieces), default_link(pred_type)

    def objective(alpha: float) -> float:
        predict, total, n_targets = predictor(alpha), 0.0, 0
        for x, y in chunks:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Some predictions", NullBayesWarning)  # the search avoids these
                found = predict(x)
            likelihood.check(found.mean, y)
            here = likelihood.n_targets(found.mean, y)
            total -= here * nll(likelihood, found.mean, found.samples - found.mean, y, link)
            n_targets += here
        return total / max(1, n_targets)

    if how == "grid":
        return best_of_grid(objective)
    return maximize(objective, 1.0, "held-out likelihood")  # whatever precision is in use
