"""What one method says about all data, read batch by batch: scores, p-values, predictions, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions import COMBINED, check_mask, combined_score, need_calibration, watched
from nullbayes.errors import DataError
from nullbayes.evaluation.entries import Entry
from nullbayes.evaluation.judging import Judged, joined, judge
from nullbayes.jacobian.loaders import Given
from nullbayes.likelihoods import Likelihood, Regression
from nullbayes.predictive import Mask, stream


@dataclass(frozen=True)
class MethodAnswers:
    """What a method says about one set of inputs."""

    scores: dict[str, Tensor]  # (N,) by the names of the rows
    judged: Judged | None  # for familiar data, if the method makes predictions
    p_values: Tensor | None  # (N,), of a calibrated method
    seconds: dict[str, float]  # by the names of the rows


@dataclass
class _Parts:
    """The same, while batches come in."""

    scores: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


def ask_familiar(entry: Entry, data: Any, mask: Mask) -> MethodAnswers:
    """Ask a method about data with targets."""
    pieces = watched(entry.method._pieces(data), entry.method._familiar, f"{entry.name!r} looks better than it is")
    found = _ask(entry, _located("in_data", pieces), mask, "in_data")
    row = next((row for row, kind in entry.kinds.items() if kind is None), None)
    if row is not None:
        need_calibration(entry.method).warn_of_ranked(found.scores[row], entry.name)
    return found


def ask_strangers(entry: Entry, name: str, data: Any, mask: Mask) -> MethodAnswers:
    """Ask a method about inputs, whose targets are skipped if there are any."""
    method, where = entry.method, f"strangers[{name!r}]"
    if isinstance(data, tuple) and method._network.input_signature:
        data = Given([data])  # several arguments of the network, or a pair with targets: its form tells
    inputs = stream(data, method._network, method._batch_fn, method.n_samples)
    return _ask(entry, ((x, None) for x in _located(where, inputs)), mask, where)


def _ask(entry: Entry, batches: Iterable[tuple[Any, Tensor | None]], mask: Mask, where: str) -> MethodAnswers:
    method, judged = entry.method, list[Judged]()
    parts = {row: _Parts() for row in entry.kinds}
    shared = any(entry.from_prediction(kind) for kind in entry.kinds.values())
    calibrated = next((row for row, kind in entry.kinds.items() if kind is None), None)
    calibration = None if calibrated is None else need_calibration(method)
    combined = calibration is not None and calibration.kind == COMBINED
    if calibration is not None:
        check_mask(calibration, mask)
    for x, targets in batches:
        prediction, taken = None, 0.0
        if shared or (targets is not None and entry.predicts):
            prediction, taken = _timed(method._predict, x, mask=mask)
        for row, kind in entry.kinds.items():
            if entry.from_prediction(kind):
                scores, own = _timed(method._scored, prediction, kind, "input", mask)
                parts[row].seconds += taken
            elif combined and row == calibrated and prediction is not None:
                scores, own = _timed(combined_score, method, x, "input", mask, prediction)
                parts[row].seconds += taken
            else:
                scores, own = _timed(method.ood_score, x, kind, mask=mask)
            parts[row].seconds += own
            parts[row].scores.append(scores)
        if targets is not None and prediction is not None:
            judged.append(judge(prediction, entry.likelihood, targets))
    scores = {row: torch.cat(part.scores) for row, part in parts.items()}
    for row, values in scores.items():
        if not bool(torch.isfinite(values).all()):
            msg = f"{row!r}: some scores on {where} are NaN or infinite; find out which inputs cause them."
            raise DataError(msg)
    return MethodAnswers(
        scores,
        joined(judged) if judged else None,
        None if calibration is None else calibration.p_value(scores[str(calibrated)]),
        {row: part.seconds for row, part in parts.items()},
    )


def _timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Call a function, and wait for what it computes; scores come to the CPU."""
    start = time.perf_counter()
    result = function(*arguments, **options)
    if isinstance(result, Tensor):
        result = result.cpu().double()
    return result, time.perf_counter() - start


def _located(where: str, batches: Iterator[Any]) -> Iterator[Any]:
    """Iterate over batches; an error says which data they belong to."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except DataError as error:
            raise type(error)(f"{where}: {error}") from error
        yield batch


def has_default_precision(method: Any) -> bool:
    """Return whether a method reports that it is at its default prior precision."""
    return bool(getattr(getattr(method, "report", None), "has_default_precision", False))


def noise_of(likelihood: Likelihood) -> tuple[float, ...]:
    """Return the standard deviation of the noise of a regression, of each output or of all; empty without noise."""
    if not isinstance(likelihood, Regression) or likelihood.sigma_noise is None:
        return ()
    given = likelihood.sigma_noise
    return given if isinstance(given, tuple) else (given,)


def costs(method: Any) -> tuple[float | None, int | None]:
    """Return the seconds of a fit, and its peak memory in bytes, where a method reports them."""
    report = getattr(method, "report", None)
    seconds = getattr(report, "seconds", None)
    return (
        float(sum(seconds.values())) if isinstance(seconds, Mapping) else None,
        getattr(report, "peak_memory", None),
    )
