"""The statistics of an input that a combined score weighs: confidence, distance of its features, and variance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions.familiar import NEIGHBOURS
from nullbayes.decisions.posterior import Posterior, need_familiar
from nullbayes.errors import DataError
from nullbayes.jacobian.batches import is_array, n_examples
from nullbayes.jacobian.features import FeatureReader
from nullbayes.predictive import SCORES, Mask, Prediction, score, stream, warn_of_padding

CONFIDENCE = ("generalized_entropy", "energy")
LOOKS = "looks"  # without a weight: it counts beyond its bound alone
_SMALLEST = 1e-30  # of a variance, before its logarithm is taken


def names(posterior: Posterior) -> tuple[str, ...]:
    """Return the names of the statistics of a posterior."""
    first: tuple[str, ...] = CONFIDENCE if posterior.likelihood.has_probabilities and posterior.n_samples else ()
    own, familiar = posterior._scoring.membership, need_familiar(posterior)
    first += () if familiar.rows is None else ("neighbour in the table",)
    first += () if familiar.looks is None else (LOOKS,)
    last = () if own is None else (f"log {own}",)
    return (*first, *(f"neighbour {k}" for k in NEIGHBOURS), "residual", *last)


def statistics(posterior: Posterior, x: Any, prediction: Prediction | None, mask: Mask) -> Tensor:  # (n, k) float64
    """Return the statistics of some inputs; each is higher for stranger inputs.

    ``prediction`` is that of the posterior, with the mask, or None for a method that is only a score.
    """
    familiar, own, likelihood = need_familiar(posterior), posterior._scoring.membership, posterior.likelihood
    columns = []
    if prediction is not None and likelihood.has_probabilities:
        columns += [score(prediction, likelihood, kind) for kind in CONFIDENCE]
    seen = FeatureReader(posterior._network, familiar.layer)(x)
    columns += [] if familiar.rows is None else [familiar.row_distances(x)]
    columns += [] if familiar.looks is None else [familiar.unlike(x)]
    columns += [*familiar.distances(seen.features).T, familiar.residual(seen.features)]
    if own is not None:
        shared = prediction is not None and own in SCORES
        last = score(prediction, likelihood, own) if shared else posterior.ood_score(x, own, mask=mask)  # type: ignore[arg-type]
        columns.append(last.double().clamp_min(_SMALLEST).log())
    return torch.stack([column.double() for column in columns], dim=1)


def combined(posterior: Posterior, x: Any, mask: Mask) -> Iterator[Tensor]:  # (n, k) each
    """Iterate over the statistics of all inputs, few at a time."""
    start = 0
    for piece in stream(x, posterior._network, posterior._batch_fn, posterior.n_samples):
        n = n_examples(piece)
        some = mask[start : start + n] if is_array(mask) else mask  # type: ignore[index]
        prediction = posterior._predict(piece, mask=some) if posterior.n_samples else None
        if prediction is not None and mask is None:
            warn_of_padding(posterior.likelihood, prediction)
        yield statistics(posterior, piece, prediction, some)
        start += n
    if is_array(mask) and len(mask) != start:  # type: ignore[arg-type]
        msg = f"The mask is for {len(mask):,} inputs, but there are {start:,}."  # type: ignore[arg-type]
        raise DataError(msg)
