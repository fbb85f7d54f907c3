"""What a fit measured is one value: the report and the fields of a file follow from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest

import nullbayes as nb
from nullbayes.posteriors.header import Amount, Count, Notes, fields_of
from nullbayes.posteriors.measured import REPORT, Measured, from_header, merged
from posteriors.fitting import each_kind, fit

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


def test_report_and_file_have_the_fields_of_what_was_measured() -> None:
    names = {field.name for field in dataclasses.fields(Measured)}
    assert names == REPORT.keys()
    assert names < {field.name for field in dataclasses.fields(nb.FitReport)}


@each_kind
def test_a_header_gives_back_what_was_measured(kind: type) -> None:
    measured = fit(kind, n_samples=3)._measured
    stored = json.loads(json.dumps(measured.to_dict()))
    assert all(REPORT[name](value) for name, value in stored.items())
    assert from_header(stored) == measured


@each_kind
def test_samples_that_are_merged_are_those_of_one_fit(kind: type) -> None:
    whole, first = fit(kind, n_samples=7)._measured, fit(kind, n_samples=3)
    three = first._measured
    seven = first.extend(4, progress=False)._measured
    assert seven.residual == pytest.approx(whole.residual)
    assert seven.traces == pytest.approx(whole.traces)
    assert seven.train_std == pytest.approx(whole.train_std)
    assert seven.seconds.keys() == three.seconds.keys()
    assert all(seven.seconds[phase] >= three.seconds[phase] for phase in three.seconds)
    assert merged(three, dataclasses.replace(three, notes=("new",) * 3)).notes == ("new",)


@dataclass(frozen=True)
class Inner:
    share: Amount
    name: str = ""


@dataclass(frozen=True)
class Example:
    n: Count
    value: float
    flag: bool
    parts: tuple[Amount, ...]
    by_name: dict[str, float]
    inner: Inner | None
    notes: Notes


GOOD: dict[str, list[Any]] = {
    "n": [0, 2**63 - 1], "value": [-1.5, 3, 0.0], "flag": [True, False], "parts": [[0.0, 1]],
    "by_name": [{}, {"a": -1.0}],
    "inner": [None, {"share": 1.0, "name": "x"}], "notes": [[], ["a"] * 64],
}  # fmt: skip
BAD: dict[str, list[Any]] = {
    "n": [-1, True, 1.0, 2**63, None], "value": [float("nan"), float("inf"), 10**400, "1", True], "flag": [0, None],
    "parts": [[], [-1.0], None, [True]], "by_name": [[], {"a": "b"}],
    "inner": [{}, {"share": -1.0, "name": ""}, {"share": 1.0}, {"share": 1.0, "name": "", "more": 1}],
    "notes": [["a"] * 65, [1], "a"],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_annotations_say_which_values_a_field_may_have(name: str) -> None:
    test = fields_of(Example)[name]
    assert all(test(value) for value in GOOD[name])
    assert not any(test(value) for value in BAD[name])
