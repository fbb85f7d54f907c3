"""The trial before a fit: a small posterior on some of the training data, judged on others that it keeps apart."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nullbayes.errors import ConvergenceWarning, SettingsError
from nullbayes.posteriors import noise
from nullbayes.posteriors.promise import SAMPLES, Promise, answers, least_precision, split
from nullbayes.posteriors.setup import Asked, Setup, set_up, within_memory
from nullbayes.precision import full_precision
from nullbayes.projectors import Outcome


@full_precision()
def run_trial(fit: Asked, base: noise.Base | None, seed: int) -> Promise:
    """Project noise on the null space of some rows of a fit, and measure what precision other examples ask for.

    The noise is that of the fit's own samples.
    """
    rows, folds = fit.rows, split(fit.rows, seed)
    looks = ((rows.examples.chosen(apart), _directions(fit, inside, base, seed)) for inside, apart in folds)
    seen = answers(rows, looks)
    needed, by = least_precision(seen)
    return Promise(sum(len(apart) for _, apart in folds), len(folds[0][0]), needed, 0.0, by, seen.std)


def _directions(fit: Asked, inside: Sequence[int], base: noise.Base | None, seed: int) -> Tensor:  # (S, P)
    """Return noise, projected on the null space of the rows of some examples."""
    rows, n_samples = fit.rows, SAMPLES if base is None else fit.n_samples
    if inside:
        asked, setup = _planned(replace(fit, rows=rows.on(rows.examples.chosen(inside))), n_samples)
        n_samples = asked.n_samples
    if base is None:
        drawn = noise.normal(rows.network, seed, 0, n_samples)
    else:
        drawn = noise.based(rows.network, base, seed, 0, n_samples)[:n_samples]
    if not inside:
        return drawn.to(rows.device, rows.dtype)
    found = list[Tensor]()

    def work(setup: Setup) -> None:
        some = copy.copy(asked.rows)  # another plan starts from what was asked
        some.working_bytes = setup.working_bytes
        state = setup.projector.prepare(some.stored(setup.storage))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # what is left then only adds to the variance
            projection = setup.projector.apply(state, drawn)
        if projection.info.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        found.append(projection.directions)

    within_memory(asked, setup, work, found.clear)
    return found[0]


def _planned(fit: Asked, n_samples: int) -> tuple[Asked, Setup]:
    """Return a plan for so many samples, for those of the fit where memory is too small, or by its own projector."""
    plans = (replace(fit, n_samples=n_samples, projector="auto"), replace(fit, projector="auto"), fit)
    for asked in plans[:-1]:
        with contextlib.suppress(SettingsError):
            return asked, set_up(asked)
    return fit, set_up(fit)
