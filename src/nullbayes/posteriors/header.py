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


def text(value: Any) -> bool:
    """Tell whether a value is a string."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Tell whether a value is a boolean."""
    return isinstance(value, bool)


def count(value: Any) -> bool:
    """Tell whether a value is a non-negative integer of at most 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # an int may be larger, and NaN fails


def not_negative(value: Any) -> bool:
    """Tell whether a value is a finite number that is not negative."""
    return number(value) and value >= 0


def positive(value: Any) -> bool:
    """Tell whether a value is a finite number larger than zero."""
    return number(value) and value > 0


def _notes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_NOTES and all(map(text, value))


def _parameter(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2 and text(value[0])):
        return False
    shape = value[1]
    return isinstance(shape, list) and len(shape) <= 64 and all(map(count, shape))  # no tensor has more dimensions


# Annotations of a report's dataclass that say more than a type does.
Count = Annotated[int, count]
Amount = Annotated[float, not_negative]
Notes = Annotated[tuple[str, ...], _notes]


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
        each = _test(inner[0])
        return lambda value: isinstance(value, list) and len(value) > 0 and all(map(each, value))
    if origin is dict:
        each = _test(inner[1])
        return lambda value: isinstance(value, dict) and all(map(each, value.values()))
    if dataclasses.is_dataclass(hint):
        fields = fields_of(hint)  # type: ignore[arg-type]
        return lambda value: (
            isinstance(value, dict) and value.keys() == fields.keys() and all(fields[n](value[n]) for n in fields)
        )
    plain: Mapping[Any, Test] = {
        str: text,
        bool: flag,
        float: number,
        NoneType: lambda value: value is None,
        Any: lambda value: True,
    }
    return plain[hint]


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _class_dim(value: Any) -> bool:
    return value is None or (type(value) is int and -64 <= value <= -1)


def _noise(value: Any) -> bool:
    several = isinstance(value, list) and len(value) > 1 and all(map(positive, value))
    return value is None or positive(value) or several


_TEMPERATURE: Fields = {"temperature": positive}
_LIKELIHOODS: Mapping[str, Fields] = {
    "classification": {
        "class_dim": _class_dim,
        "ignore_index": lambda value: type(value) is int and abs(value) < 2**63,
        "some_ignored": flag,
        "more_ignored": flag,
        **_TEMPERATURE,
    },
    "regression": {"sigma_noise": _noise, **_TEMPERATURE},
    "binary": _TEMPERATURE,
    "multilabel": _TEMPERATURE,
    "custom": {},
}
_COMMON: Fields = {
    "format_version": count,
    "kind": text,
    "parameters": lambda value: isinstance(value, list) and len(value) > 0 and all(map(_parameter, value)),
    "fingerprint": text,
    "prior_precision": positive,
    "precision_rule": lambda value: value in ("", "auto", "optimal", "paper"),
    "kernel_dimension": not_negative,
    "likelihood": _mapping,
    "report": _mapping,
    "output_fn": flag,
    "inputs": text,
}


def check_header(header: Mapping[str, Any], own: Fields, report: Fields) -> None:
    """Refuse a header that lacks a field, has one too many, or holds a value that its field cannot have.

    ``own`` and ``report`` are the fields that the class adds to the header and to its report.
    """
    check_fields({**_COMMON, **own}, header)
    name = header["likelihood"].get("name")
    if not isinstance(name, str) or name not in _LIKELIHOODS:
        altered("likelihood.name", name)
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
