"""The fields of a posterior file's header, and the values that each of them may have.

The fields of a report follow from the annotations of its dataclass. A class of posteriors declares the fields that it
adds to the header in ``_header_fields``, and those of its report in ``_report_fields``.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from nullbayes.errors import FileError

Test = Callable[[Any], bool]
Fields = Mapping[str, Test]  # name of a field -> whether it may have a value
MOST_NOTES = 64


_MAX, _TINY = sys.float_info.max, math.ulp(0.0)  # an int may be larger than a float, and NaN is in no range


def _is(*kinds: type) -> Test:
    """Return a test for values of some types, and of no types derived from them."""
    return lambda value: type(value) in kinds


def _between(low: float, high: float, *kinds: type) -> Test:
    """Return a test for numbers of some types within a range."""
    return lambda value: type(value) in kinds and low <= value <= high


def _all(test: Test, least: int = 1, most: float = math.inf) -> Test:
    """Return a test for lists of so many values that each pass another test."""
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(test, value))


text, flag, _mapping = _is(str), _is(bool), _is(dict)
count = _between(0, 2**63 - 1, int)
number, not_negative, positive = (_between(low, _MAX, int, float) for low in (-_MAX, 0.0, _TINY))


def _parameter(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and text(value[0]) and _all(count, 0, 64)(value[1])


# Annotations of a report's dataclass that say more than a type does.
Count = Annotated[int, count]
Amount = Annotated[float, not_negative]
Notes = Annotated[tuple[str, ...], _all(text, 0, MOST_NOTES)]


def fields_of(kind: type[Any]) -> Fields:
    """Return the fields of a dataclass with the tests that follow from their annotations."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _test(hints[field.name]) for field in dataclasses.fields(kind)}


def _test(hint: Any) -> Test:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        test: Test = inner[1]
        return test
    if origin in (Union, UnionType):
        options = [_test(option) for option in inner]
        return lambda value: any(test(value) for test in options)
    if origin is tuple:
        return _all(_test(inner[0]))
    if origin is dict:
        each = _test(inner[1])
        return lambda value: isinstance(value, dict) and all(map(each, value.values()))
    if dataclasses.is_dataclass(hint):
        fields = fields_of(hint)  # type: ignore[arg-type]
        return lambda value: (
            isinstance(value, dict) and value.keys() == fields.keys() and all(fields[n](value[n]) for n in fields)
        )
    plain: Mapping[Any, Test] = {str: text, bool: flag, float: number, NoneType: _is(NoneType)}
    return plain.get(hint, lambda value: True)


_TEMPERATURE: Fields = {"temperature": positive}
_LIKELIHOODS: Mapping[str, Fields] = {
    "classification": {
        "class_dim": lambda value: value is None or _between(-64, -1, int)(value),
        "ignore_index": _between(1 - 2**63, 2**63 - 1, int),
        "some_ignored": flag,
        "more_ignored": flag,
        **_TEMPERATURE,
    },
    "regression": {
        "sigma_noise": lambda value: value is None or positive(value) or _all(positive, 2)(value),
        **_TEMPERATURE,
    },
    "binary": _TEMPERATURE,
    "multilabel": _TEMPERATURE,
    "custom": {},
}
_COMMON: Fields = {
    "format_version": count,
    "kind": text,
    "parameters": _all(_parameter),
    "fingerprint": text,
    "prior_precision": positive,
    "precision_rule": lambda value: value in ("", "auto", "optimal", "paper"),
    "likelihood": _mapping,
    "report": _mapping,
    "output_fn": flag,
    "inputs": text,
    "familiar": lambda value: value is None or text(value),
    "calibration": lambda value: value is None or _mapping(value),
}


def check_header(header: Mapping[str, Any], own: Fields, report: Fields) -> None:
    """Refuse a header that lacks a field, has one too many, or holds a value that its field cannot have.

    ``own`` and ``report`` are the fields that the class adds to the header and to its report.
    """
    check_fields({**_COMMON, **own}, header)
    name = header["likelihood"].get("name")
    if not isinstance(name, str):
        altered("likelihood.name", name)
    if name in _LIKELIHOODS:  # the fields of a likelihood of the user's own are compared with those of the one given
        check_fields({"name": text, **_LIKELIHOODS[name]}, header["likelihood"], "likelihood.")
    check_fields(report, header["report"], "report.")
    rank, n_parameters = header["report"].get("rank"), sum(math.prod(shape) for _, shape in header["parameters"])
    if rank is not None and rank > n_parameters:
        altered("report.rank", rank)


def check_fields(fields: Fields, values: Mapping[str, Any], where: str = "") -> None:
    """Refuse values that are not those of the fields; ``where`` is the prefix of the names in the message."""
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
