"""Reading a posterior from a file: the file, the model and the arguments have to match."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes import io
from nullbayes.errors import FileError, ModelError, NullBayesError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.modules import unwrapped
from nullbayes.jacobian.network import OutputFn
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.checkpoint import KIND as CHECKPOINT
from nullbayes.posteriors.header import altered, check_header


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    likelihood: str | Likelihood | LossFn | None = None,
    batch_fn: BatchFn | None = None,
    output_fn: OutputFn | None = None,
) -> SamplePosterior:
    """Read a posterior that was saved for this model.

    Parameters
    ----------
    path : path
        The file.
    model : nn.Module
        With the parameters that the posterior was fitted to, on any device; a fingerprint is compared.
    likelihood : optional
        Only for a loss of one's own, which a file cannot hold.
    batch_fn, output_fn : callable, optional
        As when it was fitted.

    Notes
    -----
    A posterior of a class of your own can be loaded once the module that defines the class has been imported.
    """
    asked = None if likelihood is None else resolve(likelihood)
    if not isinstance(model, nn.Module):
        msg = f"model must be a torch.nn.Module, not {type(model).__name__}."
        raise ModelError(msg)
    tensors, header = io.read(path)
    if header.get("kind") == CHECKPOINT:
        msg = f"{path} is the checkpoint of a fit that has not finished: fit(..., checkpoint=path) goes on with it."
        raise FileError(msg)
    kind = class_named(header.get("kind"))
    check_header(header, kind._header_fields, kind._report_fields)
    try:
        return from_file(kind, tensors, header, model, asked, batch_fn, output_fn)
    except FileError:
        raise
    except NullBayesError as error:
        msg = f"{os.fspath(path)} does not fit this model: {error}"
        raise FileError(msg) from error


def class_named(name: Any) -> type[SamplePosterior]:
    """Return the newest subclass of :class:`SamplePosterior` of that name, whoever defined it."""
    kinds = _subclasses(SamplePosterior)  # type: ignore[type-abstract]
    found = [kind for kind in kinds if kind.__name__ == name and not inspect.isabstract(kind)]
    if not found:
        altered("kind", name, " If that is a class of your own, import the module that defines it first.")
    return found[-1]


def _subclasses(kind: type[SamplePosterior]) -> Iterator[type[SamplePosterior]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def from_file(
    kind: type[SamplePosterior],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    model: nn.Module,
    likelihood: Likelihood | None,
    batch_fn: BatchFn | None,
    output_fn: OutputFn | None,
) -> SamplePosterior:
    """Return the posterior of a kind that a file holds, for a model."""
    model = unwrapped(model)
    names = [name for name, _ in header["parameters"]]
    here = dict(model.named_parameters())
    missing = next((name for name in names if name not in here), None)
    if missing is not None:
        msg = f"The file belongs to a model of another structure: it has {missing!r}, which this model has not."
        raise FileError(msg)
    if header["output_fn"] is not (output_fn is not None):
        other = "without" if output_fn is not None else "with"
        msg = f"The posterior was fitted {other} an output_fn of your own: load it as it was fitted."
        raise FileError(msg)
    wanted = set(names)
    posterior = kind(
        model, _likelihood(header, likelihood), parameters=lambda name, _: name in wanted, batch_fn=batch_fn,
        output_fn=output_fn, prior_precision=float(header["prior_precision"]),
    )  # fmt: skip
    network = posterior._network
    _check_model(header, network.names, network.shapes, network.fingerprint())
    posterior._directions = _directions(kind, tensors, network.n_parameters, network.dtype).to(network.device)
    posterior._kernel_dimension = float(header["kernel_dimension"])
    if header["precision_rule"]:
        posterior._precision_rule, posterior._precision = header["precision_rule"], float(header["prior_precision"])
    network.trained_on = header["inputs"]
    posterior._restore(tensors, header)
    return posterior


def _likelihood(header: Mapping[str, Any], given: Likelihood | None) -> Likelihood:
    """Return the likelihood of the file, or the one that was given, if it is of the same kind."""
    stored = dict(header["likelihood"])
    if given is None:
        if stored["name"] == "custom":
            msg = (
                "The posterior was fitted with a loss of your own, which a file cannot hold: "
                "pass load(..., likelihood=loss)."
            )
            raise FileError(msg)
        return resolve(stored.pop("name"), **stored)
    if given.name != stored["name"]:
        msg = f"The posterior was fitted with a {stored['name']} likelihood, not with {given.name}: leave it out."
        raise FileError(msg)
    plain = given.name != "custom" and given == resolve(given.name)
    return resolve(stored.pop("name"), **stored) if plain else given  # a name alone takes nothing back


def _directions(kind: type[SamplePosterior], tensors: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """Return the directions of the file, if they are those of samples of so many parameters."""
    directions = tensors.get("directions", torch.zeros(0))
    few = directions.ndim != 2 or len(directions) < kind._fewest
    if few or directions.shape[1] != size or directions.dtype != dtype:
        msg = (
            f"The file's directions are {directions.dtype} of shape {tuple(directions.shape)}, the model needs "
            f"{dtype} of shape (samples, {size}): it was altered, fit and save again."
        )
        raise FileError(msg)
    if not torch.isfinite(directions).all():
        msg = "The file's directions are not finite: it was altered, fit and save again."
        raise FileError(msg)
    return directions


def _check_model(
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
