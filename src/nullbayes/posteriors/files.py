"""Reading a posterior back from a file: what has to fit between the file, the model and the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes import io
from nullbayes.errors import FileError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.modules import unwrapped
from nullbayes.jacobian.network import OutputFn
from nullbayes.likelihoods import Likelihood, resolve
from nullbayes.posteriors.base import SamplePosterior


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
    io.check_model(header, network.names, network.shapes, network.fingerprint())
    posterior._directions = _directions(kind, tensors, network.n_parameters, network.dtype).to(network.device)
    posterior._kernel_dimension = float(header["kernel_dimension"])
    if header["precision_rule"]:
        posterior._precision_rule, posterior._precision = header["precision_rule"], float(header["prior_precision"])
    network.input_signature = header["inputs"]
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
