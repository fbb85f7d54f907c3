"""Data that should be new and are not: training inputs, inputs that have tuned the posterior, and copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions.familiar import Familiar, repeated_share
from nullbayes.decisions.posterior import Posterior, need_familiar
from nullbayes.errors import DataError, warn

_CHANCE = 0.05  # of the inputs may be training inputs without a warning
_TIMES = 4.0  # as many pairs of equal inputs as expected are no chance
_ERRORS = 3.0  # standard errors within which a share of training inputs is that of chance
OVERLAP = 0.01  # of the held-out examples may be training inputs, and more by chance, which are then left out


def watched(
    pieces: Iterable[tuple[Any, Tensor]], familiar: Familiar | None, purpose: str, sums: list[Tensor] | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """Pass inputs and targets on, and warn at the end if many of the inputs were training inputs.

    Their checksums are added to ``sums``.
    """
    total = seen = 0
    for x, y in pieces:
        yield x, y
        total += len(y)
        if familiar is not None:
            found = familiar.checksums(x, len(y))
            seen += int(familiar.seen_in(found).sum())
            if sums is not None:
                sums.append(found)
    if familiar is not None and seen > max(_CHANCE, 2.0 * familiar.repeated) * total:
        warn(f"{seen:,} of the {total:,} inputs are training data: {purpose}. Pass data that were not trained on.")


def warn_of_tuned(familiar: Familiar | None, sums: Tensor) -> None:  # (n,)
    """Warn if many of the inputs that are to calibrate, given by their checksums, have tuned the posterior before."""
    if familiar is None or familiar.tuned is None:
        return
    seen = int(torch.isin(sums, familiar.tuned).sum())
    if seen > max(_CHANCE, 2.0 * familiar.repeated) * len(sums):
        warn(
            f"{seen:,} of the {len(sums):,} held-out inputs have chosen the precision or the temperature before, which "
            "suit them better than new data, so that decisions are wrong more often than alpha says. Split the "
            "held-out data: tune with one part, and calibrate with the other."
        )


def warn_of_copies(familiar: Familiar | None, sums: Tensor) -> None:  # (n,)
    """Warn if held-out inputs, given by their checksums, are equal to one another more often than chance makes them.

    Pairs of two held-out, of two training inputs, and of one of each are equal with the same probability, if all were
    drawn alike: none of photographs, many of a table of a few categories.
    """
    if familiar is None or repeated_share(sums) <= _CHANCE:
        return
    values, counts = sums.unique(return_counts=True)
    known, times = familiar.sums.unique(return_counts=True)
    shared = torch.isin(values, known), torch.isin(known, values)  # both in ascending order
    across = int((counts[shared[0]] * times[shared[1]]).sum())
    n, m, pairs = len(sums), len(familiar.sums), int((counts * (counts - 1)).sum()) / 2
    chance = (int((times * (times - 1)).sum()) / 2 + across) / (m * (m - 1) / 2 + m * n)
    if pairs > _TIMES * chance * n * (n - 1) / 2:
        warn(
            f"{n - len(values):,} of the {n:,} held-out inputs are copies of others, and training inputs are not "
            "repeated as often. Copies say nothing new, so that decisions are wrong more often than alpha says. Pass "
            "each example once: no oversampling, no sampler that draws with replacement."
        )


def unseen(posterior: Posterior, sums: Tensor) -> Tensor:  # (n,) -> bool (n,)
    """Return which inputs, given by their checksums, are no training inputs."""
    if posterior._familiar is None:
        return torch.ones_like(sums, dtype=torch.bool)
    return ~posterior._familiar.seen_in(sums)


def check_overlap(posterior: Posterior, n: int, overlap: int) -> None:
    """Refuse held-out data with many training inputs; ``n`` others are left."""
    usual = OVERLAP * (n + overlap)
    if overlap > usual + _ERRORS * usual**0.5:  # of few examples, one or two that occur twice are more than the share
        raise DataError(_training_data(posterior, n + overlap, overlap))
    if overlap:
        warn(f"{overlap:,} of the {n + overlap:,} held-out inputs are training data; they were left out.")


def check_repeated(posterior: Posterior, n: int, overlap: int, repeated: float) -> None:
    """Refuse held-out data that hold more training inputs than by chance, where training inputs repeat."""
    error = 0.5 / max(1, n) ** 0.5 + 0.5 / len(need_familiar(posterior).sums) ** 0.5  # standard errors, at most
    if overlap > (repeated + _ERRORS * error) * n:
        raise DataError(_training_data(posterior, n, overlap))
    if overlap:
        warn(
            f"{overlap:,} of the {n:,} held-out inputs are equal to training inputs. They are kept, because "
            f"{repeated:.0%} of the training inputs are equal to one another, so that new inputs are often equal to "
            "training inputs, too. If they are the training data, calibrate with other data."
        )


def _training_data(posterior: Posterior, n: int, overlap: int) -> str:
    return (
        f"{overlap:,} of the {n:,} held-out inputs are training data of {type(posterior).__name__}. A network is more "
        "certain of these than of new inputs: calibrate with data that it was not trained on."
    )
