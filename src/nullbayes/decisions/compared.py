"""What a calibration compares held-out inputs with: strangers that are made of them, and training data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions import statistics
from nullbayes.decisions.held_out import position_scores
from nullbayes.decisions.posterior import Posterior, need_familiar
from nullbayes.decisions.strangers import strangers
from nullbayes.decisions.words import extreme_words, strange_words
from nullbayes.errors import NullBayesWarning
from nullbayes.jacobian.batches import take_examples
from nullbayes.jacobian.tables import Lookup, find_lookups, takes
from nullbayes.metrics import auroc
from nullbayes.predictive import Mask

_MOST_TRAINED = 500  # training data that tell what is too low
_FEW = 16  # inputs that a network is tried with
_AS_GOOD = 0.06  # of AUROC, about two standard errors


def made_strangers(posterior: Posterior, pool: list[Any], mask: Mask) -> dict[str, Tensor]:
    """Return the statistics of artificial strangers, by kind."""
    generator, found = torch.Generator().manual_seed(1), dict[str, list[Tensor]]()
    for x in pool:
        for kind, made in strangers(x, generator, _lookups(posterior, x, pool), pool):
            with _made_up():
                values = torch.cat(list(statistics.combined(posterior, made, mask))).cpu()
            values = values[torch.isfinite(values).all(1)]
            if len(values):
                found.setdefault(kind, []).append(values)
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def trained_statistics(posterior: Posterior, pool: list[Any], mask: Mask) -> Tensor | None:  # (t, k)
    """Return the statistics of some training data where these are rows of a table, and None elsewhere.

    A row can be too near to the middle of a table to be familiar, and these say what is not too near.
    """
    familiar = need_familiar(posterior)
    if not familiar.table or not pool:
        return None
    known = familiar.inputs(pool[0], _MOST_TRAINED)
    return torch.cat(list(statistics.combined(posterior, known, mask))).cpu()


def best_position_kind(posterior: Posterior, pool: list[Any], mask: Mask, kinds: tuple[str, ...]) -> str:
    """Return the first score that tells positions of held-out inputs from those of strangers as well as the best.

    The variance comes first. Many positions of artificial strangers are familiar, so that small differences say little.
    """
    generator, tried = torch.Generator().manual_seed(4), 0
    wins = torch.zeros(len(kinds), dtype=torch.float64, device="cpu")
    for x in pool if len(kinds) > 1 else ():
        own = position_scores(posterior, posterior._predict(x, mask=mask), kinds, generator)
        for _, made in strangers(x, torch.Generator().manual_seed(1), _lookups(posterior, x, pool), pool):
            with _made_up():
                other = position_scores(posterior, posterior._predict(made, mask=mask), kinds, generator)
            assert own is not None
            assert other is not None
            if bool(other.isnan().all(0).any()):  # the network answers none of these strangers
                continue
            pairs, tried = zip(own.T, other.T, strict=True), tried + 1
            wins += torch.tensor([auroc(a[~a.isnan()], b[~b.isnan()]) for a, b in pairs], device="cpu")
    wins /= max(1, tried)
    return kinds[int((wins >= wins.max() - _AS_GOOD).nonzero()[0])]


@contextmanager
def _made_up() -> Iterator[None]:
    """Predict inputs that nobody has passed, without warnings of NaN: nobody can leave these inputs out."""
    with warnings.catch_warnings():
        for message in ("The network itself answers NaN", "Some predictions or their variances"):
            warnings.filterwarnings("ignore", message, NullBayesWarning)
        yield


def _lookups(posterior: Posterior, x: Any, pool: list[Any]) -> list[Lookup]:
    """Return which columns are looked up in tables; none if the network does not take other lines of these."""
    few, network = take_examples(x, 0, _FEW), posterior._network
    lookups = find_lookups(network, x)
    drawn = strange_words(few, lookups, torch.Generator().manual_seed(1), pool)
    tried = (*extreme_words(few, lookups, pool), *(made for _, made in drawn)) if lookups else ()
    return lookups if all(takes(network, made) for made in tried) else []
