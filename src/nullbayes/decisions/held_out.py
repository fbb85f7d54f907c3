"""Held-out data, read once and in any order: statistics, errors, and inputs that strangers are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions import answers, statistics
from nullbayes.decisions.familiar import Familiar
from nullbayes.decisions.overlap import (
    OVERLAP,
    check_overlap,
    check_repeated,
    unseen,
    warn_of_copies,
    warn_of_tuned,
)
from nullbayes.decisions.posterior import Posterior
from nullbayes.decisions.remembering import by_place
from nullbayes.errors import DataError, warn
from nullbayes.jacobian.batches import (
    BatchFn,
    described,
    inputs_of,
    is_array,
    join_examples,
    n_examples,
    places,
    single_checksums,
    table_rows,
    take_examples,
)
from nullbayes.jacobian.loaders import Given, as_loader
from nullbayes.jacobian.opening import Guesses
from nullbayes.predictive import SCORES, Mask, Prediction, scores_of, stream

COMBINED = "combined"
_LEAST = 40  # held-out examples: half of them are ranked, and twenty can tell five per cent
_MOST_LEARNED = 1000  # held-out examples that weights are learned from
_PER_KIND = 250  # strangers of each kind
_FAR = 20.0  # standard deviations by which half of the targets are away from their predictions
_OTHER_SCALE = 10.0  # times the spread of training inputs
_OF_POSITIONS = ("max_variance", "mutual_information", "entropy", "energy", "generalized_entropy")


@dataclass
class HeldOut:
    """What was read of the held-out data."""

    columns: Tensor  # (n, k) statistics, or the score alone
    errors: Tensor | None
    position_scores: Tensor | None  # (n, k) of each kind of score
    keys: Tensor  # (n,) random numbers: the examples with the smallest ones are learned from
    pool: list[Any]  # inputs with the smallest keys, joined as far as they have one form

    def split(self, *, learns: bool) -> tuple[Tensor, Tensor]:
        """Return the numbers of the examples to learn from, and of those to rank."""
        n = len(self.keys)
        n_learned = min(_MOST_LEARNED, n // 2) if learns else 0
        order = self.keys.argsort()
        return order[:n_learned].sort().values, order[n_learned:].sort().values


@dataclass
class _Pool:
    """The inputs with the smallest keys among all that were seen, at most so many."""

    most: int
    entries: list[tuple[float, Any]] = field(default_factory=list)

    def see(self, x: Any, keys: Tensor) -> None:
        """Take in some inputs with their keys."""
        limit = max(key for key, _ in self.entries) if len(self.entries) >= self.most else float("inf")
        for i in (keys < limit).nonzero()[:, 0].tolist():
            one = join_examples([take_examples(x, i, i + 1)])  # a copy: a slice would keep the whole batch
            self.entries.append((float(keys[i]), one))
        self.entries = sorted(self.entries, key=lambda entry: entry[0])[: self.most]

    def joined(self, n: int) -> list[Any]:
        """Return the ``n`` inputs with the smallest keys, those of one form together."""
        groups: dict[str, list[Any]] = {}
        for _, one in self.entries[:n]:
            groups.setdefault(described(one), []).append(one)
        return [join_examples(group) for group in groups.values() if len(group) > 1]


def pieces(posterior: Posterior, loader: Any, targets: Any) -> Iterator[tuple[Any, Tensor | None]]:
    """Iterate over held-out inputs and their targets; None where there are none."""
    posterior._network.check_unchanged()
    if targets is None and isinstance(loader, Mapping):
        inputs = inputs_of(loader, None, posterior._network.input_signature)
        loader = loader if len(inputs) == len(loader) else [loader]  # one batch that brings its targets
    if targets is None and (is_array(loader) or isinstance(loader, Mapping)):
        for x in stream(loader, posterior._network, posterior._batch_fn, 1):
            yield x, None
        return
    data = loader if targets is None else (loader, targets)
    if isinstance(source := as_loader(data), Given):
        yield from posterior._pieces(data)
        return
    with torch.random.fork_rng(devices=()):  # a DataLoader draws a seed
        iterator = iter(source)
    for first in iterator:
        whole = chain([first], iterator)
        if _has_targets(first, posterior._batch_fn, posterior._network.input_signature):
            yield from posterior._pieces(whole)
        else:
            yield from ((x, None) for x in stream(whole, posterior._network, posterior._batch_fn, 1))
        return
    yield from posterior._pieces(data)  # which says that it is empty


def _has_targets(batch: Any, batch_fn: BatchFn | None, signature: str) -> bool:
    """Return whether a batch of a loader is more than inputs of the form that the signature describes."""
    if batch_fn is not None:
        try:
            pair = batch_fn(batch)
        except Exception:  # whatever is wrong with it shows where the batch is taken apart
            return True
        return not (isinstance(pair, (tuple, list)) and len(pair) == 2 and pair[1] is None)
    if isinstance(batch, Mapping):
        return len(inputs_of(batch, None, signature)) < len(batch)
    if isinstance(batch, (tuple, list)):
        return len(batch) != 1 and places(described(batch)) != places(signature)
    return not is_array(batch)


def read(posterior: Posterior, data: Iterator[tuple[Any, Tensor | None]], kind: str, mask: Mask) -> HeldOut:
    """Read the held-out data once: statistics or scores, errors, and inputs to make strangers of."""
    split, of_errors, of_scores = (torch.Generator().manual_seed(seed) for seed in (0, 2, 3))
    columns, errors, positions, keys, pool, guesses, overlap = [], [], [], [], _Pool(_PER_KIND), Guesses(), 0
    sums: list[Tensor] = []
    familiar = posterior._familiar
    repeated = 0.0 if familiar is None else familiar.repeated
    for x, y in data:
        n = n_examples(x)
        drawn = torch.rand(n, generator=split, dtype=torch.float64, device="cpu")
        sums.append(single_checksums(x, n) if familiar is None else familiar.checksums(x, n))
        new = unseen(posterior, sums[-1])
        overlap += int((~new).sum())
        if repeated > OVERLAP:  # new inputs are often equal to training inputs, and are still new
            new = torch.ones_like(new)
        if not bool(new.any()):
            continue
        if not bool(new.all()):
            where = new.nonzero()[:, 0]
            x, y = _at(x, where), None if y is None else y[where.to(y.device)]
            drawn = drawn[where]
        prediction = posterior._predict(x, mask=mask) if posterior.n_samples else None
        if kind == COMBINED:
            columns.append(statistics.statistics(posterior, x, prediction, mask).cpu())
        else:
            columns.append(posterior.ood_score(x, kind, mask=mask).double().cpu()[:, None])
        keys.append(drawn)
        pool.see(x, drawn)
        errors.append(_errors_of(posterior, prediction, y, of_errors))
        if prediction is not None and y is not None:
            guesses.add(posterior.likelihood, prediction.mean, y)
        positions.append(position_scores(posterior, prediction, position_kinds(posterior, kind), of_scores))
    count = sum(map(len, keys))
    if repeated > OVERLAP:
        check_repeated(posterior, count, overlap, repeated)
        given = count
    else:
        check_overlap(posterior, count, overlap)
        given = count + overlap  # a row that occurs twice, once on each side, is no reason to refuse all others
    if given < _LEAST:
        msg = f"There are {count} held-out examples: calibrate needs at least {_LEAST}, and a thousand are better."
        raise DataError(msg)
    guesses.check("held-out")
    found_errors = _joined(errors)
    if found_errors is not None and not posterior.likelihood.has_probabilities:
        _check_distances(found_errors)
    warn_of_tuned(familiar, torch.cat(sums))
    warn_of_copies(familiar, torch.cat(sums))
    some = pool.joined(min(_PER_KIND, _MOST_LEARNED, count // 2))
    if familiar is not None and some:
        _check_scales(familiar, max(some, key=n_examples))
    return HeldOut(
        _finite(torch.cat(columns), kind), found_errors, _joined(positions), torch.cat(keys), some
    )  # fmt: skip


def _at(x: Any, where: Tensor) -> Any:
    return join_examples([take_examples(x, int(i), int(i) + 1) for i in where])


def _finite(columns: Tensor, kind: str) -> Tensor:
    bad = ~torch.isfinite(columns).all(1)
    if bool(bad.any()):
        msg = (
            f"The score {kind!r} of {int(bad.sum()):,} of the {len(bad):,} held-out examples is not finite: scale the "
            "inputs as in training, or use a larger prior_precision."
        )
        raise DataError(msg)
    return columns


def _check_distances(errors: Tensor) -> None:  # (n,) or (n, O), in standard deviations
    """Warn of numbers that are so far from their predictions that they are in other units."""
    usual = float(errors.nanmedian(0).values.max())
    if usual > _FAR:
        warn(
            f"Half of the held-out targets are more than {usual:.3g} standard deviations away from their predictions, "
            "and intervals will be as wide. Are inputs and targets scaled as in training?"
        )


def _check_scales(familiar: Familiar, x: Any) -> None:
    """Warn of inputs that were prepared in another way than those of the training data."""
    for away, wider in _scales(familiar, x):
        if away > _OTHER_SCALE or not 1.0 / _OTHER_SCALE < wider < _OTHER_SCALE:
            warn(
                f"Held-out inputs are {wider:.3g} times as spread out as training inputs, and {away:.3g} standard "
                "deviations away from them. Were they scaled and normalized as in training? Held-out inputs that were "
                "not make strangers look familiar."
            )
            return


def _scales(familiar: Familiar, x: Any) -> Iterator[tuple[float, float]]:
    """Iterate over the numbers of inputs: how far off they are on average, and how many times as spread out.

    Both are compared with remembered inputs, in their standard deviations: column by column for a table, or each
    tensor as a whole. Few rows of a table may lack the largest amounts of many, and without a table only a few inputs
    are remembered, and images may be dark or bright: the more are compared in parts of as many as the fewer, and the
    part that differs least counts.
    """
    if familiar.rows is not None:
        new = table_rows(x)
        if new is not None and new.shape[1] == familiar.rows.shape[1]:
            count = max(1, len(familiar.rows) // len(new))
            yield min((_scale(familiar.rows[i::count], new) for i in range(count)), key=_apart)
    elif familiar.probe is not None:
        here = by_place(x)
        for place, known in familiar.probe.inputs.items():
            new = here.get(place) if known.is_floating_point() else None
            if new is not None:
                parts = (_scale(known.reshape(-1, 1), part.reshape(-1, 1)) for part in new.split(len(known)))
                yield min(parts, key=_apart)


def _scale(known: Tensor, new: Tensor) -> tuple[float, float]:  # (n, p), (m, p)
    """Return how far off new numbers are, and how many times as spread out: the median over the columns.

    Columns of rare categories are constant in a few rows, so that the spread is the root mean square over the columns
    where that is nearer to one.
    """
    known, new = known.double().cpu(), new.double().cpu()
    spread = known.std(0, unbiased=False)
    varies = spread > 0
    if not bool(varies.any()):
        return 0.0, 1.0
    away, wider = (new.mean(0) - known.mean(0)).abs() / spread, new.std(0, unbiased=False) / spread
    spreads = float(wider[varies].median()), float(wider[varies].square().mean().sqrt())
    return float(away[varies].median()), min(spreads, key=_off_one)


def _apart(found: tuple[float, float]) -> float:
    """Return how much inputs differ that are so far off, and so many times as spread out."""
    return max(found[0], _off_one(found[1]))


def _off_one(ratio: float) -> float:
    """Return how many times as large or as small as one a ratio is."""
    return max(ratio, 1.0 / ratio) if ratio > 0.0 else math.inf


def _errors_of(
    posterior: Posterior, prediction: Prediction | None, y: Tensor | None, generator: torch.Generator
) -> Tensor | None:
    if prediction is None or y is None:
        return None
    posterior.likelihood.check(prediction.mean, y)
    found = answers.errors(posterior.likelihood, prediction, y, generator)
    return None if found is None else found.double().cpu()


def position_kinds(posterior: Posterior, kind: str) -> tuple[str, ...]:
    """Return the score of single positions that belongs to a calibrated score, or those to choose from."""
    if kind != COMBINED:
        return (kind,) if kind in SCORES else ()
    return tuple(k for k in _OF_POSITIONS if k in scores_of(posterior.likelihood) and k in posterior._scoring.kinds)


def position_scores(
    posterior: Posterior, prediction: Prediction | None, kinds: tuple[str, ...], generator: torch.Generator
) -> Tensor | None:  # (n, k)
    """Return scores at the same random position of each input."""
    if prediction is None or not kinds or len(posterior.likelihood.positions(prediction.mean)) < 2:
        return None
    columns, state = [], generator.get_state()
    for kind in kinds:
        scores = posterior._scored(prediction, kind, "position", "all")
        generator.set_state(state)
        columns.append(answers.one_position(scores, ~scores.isnan(), generator).double().cpu())
    return torch.stack(columns, dim=1)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found and len(found) == len(parts) else None
