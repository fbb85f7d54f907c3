"""What of a posterior file has to match what `load` is given: the likelihood and the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import FileError
from nullbayes.likelihoods import BUILT_IN, Likelihood, Regression, resolve

_OF_FIT = ("name", "some_ignored", "more_ignored")  # fields of likelihoods that are no settings of the user


def stored_likelihood(header: Mapping[str, Any], given: Likelihood | None) -> Likelihood:
    """Return the likelihood of the file, with all that it took from data, or the user's own that was given."""
    stored = dict(header["likelihood"])
    name = stored.pop("name")
    built_in = name in BUILT_IN
    if given is None and not built_in:
        what = "a loss of your own" if name == "custom" else f"a likelihood of your own, {name[:60]!r}"
        argument = "loss" if name == "custom" else "..."
        msg = f"The posterior was fitted with {what}, which a file cannot hold: pass load(..., likelihood={argument})."
        raise FileError(msg)
    if given is not None and given.name != name:
        advice = "leave it out" if built_in else "pass that one"
        msg = f"The posterior was fitted with a {name[:60]} likelihood, not with {given.name}: {advice}."
        raise FileError(msg)
    if given is not None and not built_in:
        return _own_likelihood(given, stored)
    found = resolve(name, **stored)
    if given is not None and (setting := _contradicted(found, given)):
        msg = (
            f"The posterior has {setting}={getattr(found, setting)!r} in its likelihood, not "
            f"{getattr(given, setting)!r}: leave likelihood=... out, because the file holds it."
        )
        raise FileError(msg)
    return found


def _own_likelihood(given: Likelihood, stored: Mapping[str, Any]) -> Likelihood:
    """Return a likelihood of the user's own with the settings of the file, which a fit may have found."""
    settings = given.settings()
    if settings.keys() != stored.keys():
        held, own = (", ".join(map(str, names)) or "none" for names in (stored, settings))
        msg = f"The file holds other settings of the likelihood ({held}) than it has ({own}): pass that of the fit."
        raise FileError(msg)
    pairs = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    if not pairs:
        return given
    if not is_dataclass(given):
        msg = f"The settings of {type(given).__name__} cannot be restored: make it a frozen dataclass, and fit again."
        raise FileError(msg)
    return replace(given, **pairs)


def _contradicted(stored: Likelihood, given: Likelihood) -> str:
    """Return the name of a setting that was given and is not that of the file; a default says nothing."""
    if isinstance(stored, Regression):
        stored = stored.tempered(given.temperature)  # the noise before it was tuned
    for field in fields(given):  # type: ignore[arg-type]
        asked, found = getattr(given, field.name), getattr(stored, field.name)
        if field.name in _OF_FIT or asked == field.default or (field.name == "class_dim" and asked >= 0):
            continue  # dimensions that are counted from the front are -1 or another, as outputs have it
        pairs = [value if isinstance(value, tuple) else (value,) for value in (asked, found)]
        if len(pairs[0]) != len(pairs[1]) or not all(isclose(*pair, rel_tol=1e-6) for pair in zip(*pairs, strict=True)):
            return field.name
    return ""


def check_precision(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse a model in another precision than that of the file."""
    found = tensors["directions"].dtype if "directions" in tensors else dtype
    if found != dtype:
        msg = f"The file belongs to a model in {found}, and this one is in {dtype}: load it with model.to({found})."
        raise FileError(msg)


def check_model(
    header: Mapping[str, Any], names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], fingerprint: str
) -> None:
    """Refuse a file that was made for another model."""
    wanted = [(name, tuple(shape)) for name, shape in header["parameters"]]
    here = list(zip(names, shapes, strict=True))
    if wanted != here:
        odd = next(
            (f"{a[0]} {a[1]}" for a in wanted if a not in here),
            f"{len(wanted)} parameters instead of {len(here)}",
        )
        msg = f"The file belongs to a model of another structure: it has {odd}, which this model has not."
        raise FileError(msg)
    if header["fingerprint"] != fingerprint:
        msg = (
            "The file belongs to a model of the same structure with other parameters: "
            "load the state_dict that the posterior was fitted to."
        )
        raise FileError(msg)
