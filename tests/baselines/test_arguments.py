"""Every method takes the same arguments, and its own settings reach it and its files."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes import baselines
from support.method_table import (
    Method,
    answer,
    each_baseline,
    each_method,
)
from support.models import CLASSIFICATION, MLP

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name, with those that a typed dictionary of options names."""
    found = dict(inspect.signature(function).parameters)
    if found.pop("options", None) is not None:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
        found |= dict.fromkeys(typing.get_args(hints["options"])[0].__annotations__)
    return found


@each_method
def test_methods_take_the_same_arguments(method: Method) -> None:
    made = arguments(method.kind)
    assert list(made)[:2] == ["model", "likelihood"]
    assert {"parameters", "prior_precision", "batch_fn"} <= set(made)
    fitted = arguments(method.kind.fit)
    assert list(fitted)[:4] == ["self", "loader", "targets", "n_samples"]
    assert fitted["n_samples"].default == 30
    assert {"generator", "memory_limit", "progress"} <= set(fitted)
    assert {"pred_type", "n_samples", "mask"} <= set(inspect.signature(method.kind.predict).parameters)
    assert {"x", "kind", "per", "mask"} <= set(inspect.signature(method.kind.ood_score).parameters)
    assert {"loader", "method"} <= set(inspect.signature(method.kind.optimize_prior_precision).parameters)
    for name in ("fit", "predict", "ood_score", "save", "check_fit", "optimize_prior_precision", "report"):
        assert inspect.getdoc(getattr(method.kind, name)), name


def another(value: Any) -> Any:
    """Another value that a setting may have; None where that cannot be told from the default."""
    return {int: lambda: value + 1, float: lambda: value / 2}.get(type(value), lambda: None)()


@each_baseline
def test_settings_reach_the_method_and_a_file(method: Method, tmp_path: Path) -> None:
    default, taken = method.kind._method, arguments(method.kind)
    fields, common = [field.name for field in dataclasses.fields(default)], set(arguments(baselines.Baseline))
    assert set(taken) - common <= set(fields), "an argument that is no field of the method, and not in its files"
    changed = {name: another(getattr(default, name)) for name in fields if name in taken}
    changed = {name: value for name, value in changed.items() if value is not None}
    model = MLP.build()
    posterior = method.make(model=model, **changed)
    assert {name: getattr(posterior._method, name) for name in changed} == changed
    assert method.kind._method is default
    data, generator = [CLASSIFICATION.data()], torch.Generator().manual_seed(0)
    posterior.fit(data, 4, generator=generator, progress=False, **method.extra(model)).save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model)
    assert {name: getattr(loaded._method, name) for name in changed} == changed
    if method.prior:
        loaded.prior_precision = posterior.prior_precision = 2.0  # samples are drawn again, from what the file holds
    torch.testing.assert_close(answer(method, loaded), answer(method, posterior), rtol=1e-10, atol=1e-12)
