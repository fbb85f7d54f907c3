"""What the header of a posterior file holds, field by field: the definition of the format, and the check of a file.

Fields that a class adds to the header are declared by the class, in ``_header_fields`` and ``_report_fields``.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nullbayes.errors import FileError

Test = Callable[[Any], bool]
Fields = Mapping[str, Test]  # name of a field -> whether a value can be in it
MOST_NOTES = 64


def _text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Tell whether a value is a boolean."""
    return isinstance(value, bool)


def count(value: Any) -> bool:
    """Tell whether a value is an integer that is not negative, of at most 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def _integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _dimension(value: Any) -> bool:
    return type(value) is int and -64 <= value <= -1


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # an int may be larger, NaN is not


def _not_negative(value: Any) -> bool:
    return _number(value) and value >= 0


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _fields(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _one_or_more(test: Test) -> Test:
    return lambda value: test(value) or (isinstance(value, list) and len(value) > 1 and all(map(test, value)))


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and len(value) > 0 and all(map(test, value))


def _parameter(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2 and _text(value[0])):
        return False
    shape = value[1]
    return isinstance(shape, list) and len(shape) <= 64 and all(map(count, shape))  # more dimensions no tensor has


_TEMPERATURE: Fields = {"temperature": _positive}
_LIKELIHOODS: Mapping[str, Fields] = {
    "classification": {
        "class_dim": _or_none(_dimension), "ignore_index": _integer, "some_ignored": flag, "more_ignored": flag,
        **_TEMPERATURE,
    },
    "regression": {"sigma_noise": _or_none(_one_or_more(_positive)), **_TEMPERATURE},
    "binary": _TEMPERATURE, "multilabel": _TEMPERATURE, "custom": {},
}  # fmt: skip
_PROMISE: Fields = {
    "n_apart": count, "n_trial": count, "needed_apart": _not_negative, "needed_inside": _not_negative,
    "decided_by": _text, "apart_std": _not_negative, "nll_network": _number, "nll_posterior": _number,
    "accuracy_network": _or_none(_not_negative), "accuracy_posterior": _or_none(_not_negative),
}  # fmt: skip
REPORT: Fields = {
    "projector": _text, "reason": _text, "route": _text, "n_data": count, "n_rows": count, "n_counted": count,
    "tolerance": _not_negative, "sweeps": count, "residual": _list_of(_not_negative), "converged": flag,
    "traces": _list_of(_number), "rank": _or_none(count), "output_std": _not_negative, "seed": count,
    "train_std": _not_negative, "worst_ratio": _or_none(_not_negative), "train_loss_std": _or_none(_not_negative),
    "peak_memory": _or_none(count),
    "data": _text, "promise": _or_none(_fields),
    "notes": lambda value: isinstance(value, list) and len(value) <= MOST_NOTES and all(map(_text, value)),
    "seconds": lambda value: _fields(value) and all(map(_not_negative, value.values())),
}  # fmt: skip
_COMMON: Fields = {
    "format_version": count, "kind": _text, "parameters": _list_of(_parameter), "fingerprint": _text,
    "prior_precision": _positive, "precision_rule": lambda value: value in ("", "auto", "optimal", "paper"),
    "kernel_dimension": _not_negative, "likelihood": _fields, "report": _fields,
    "output_fn": flag, "inputs": _text,
}  # fmt: skip


def check_header(header: Mapping[str, Any], own: Fields, report: Fields) -> None:
    """Refuse a header that lacks a field, has one too many, or holds a value that its field cannot have.

    ``own`` and ``report`` are the fields that the class adds to the header and to its report.
    """
    _check({**_COMMON, **own}, header, "")
    name = header["likelihood"].get("name")
    if not isinstance(name, str) or name not in _LIKELIHOODS:
        altered("likelihood.name", name)
    _check({"name": _text, **_LIKELIHOODS[name]}, header["likelihood"], "likelihood.")
    _check(report, header["report"], "report.")
    if header["report"].get("promise") is not None:
        _check(_PROMISE, header["report"]["promise"], "report.promise.")
    rank, n_parameters = header["report"].get("rank"), sum(math.prod(shape) for _, shape in header["parameters"])
    if rank is not None and rank > n_parameters:
        altered("report.rank", rank)


def _check(fields: Fields, values: Mapping[str, Any], where: str) -> None:
    for name in [*fields, *values]:
        if name not in fields:
            altered(f"{where}{name}", "one field too many")
        if name not in values:
            altered(f"{where}{name}", "missing")
        if not fields[name](values[name]):
            altered(f"{where}{name}", values[name])


def altered(field: str, value: Any, advice: str = "") -> NoReturn:
    """Refuse a header because of one of its fields."""
    msg = (
        f"This is not a posterior file of this version, or it was altered: {field[:60]} of its header is "
        f"{reprlib.repr(value)}. Take another copy of it, or fit and save again.{advice}"
    )
    raise FileError(msg)
