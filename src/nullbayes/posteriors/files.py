"""Posteriors in files and copies: what is written, and what has to match when it is read.

The functions with an argument ``self`` are methods of :class:`SamplePosterior`.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nullbayes import io
from nullbayes.decisions import calibration, familiar_file, outdated
from nullbayes.errors import FileError, SettingsError, warn
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.modules import unwrapped
from nullbayes.jacobian.network import OutputFn, the_output
from nullbayes.likelihoods import BUILT_IN, Likelihood, resolve
from nullbayes.posteriors.matching import check_model, check_precision, stored_likelihood

T = TypeVar("T")


def save(self: Any, path: str | os.PathLike[str]) -> None:
    """Write samples, settings and a fingerprint of the model to a safetensors file, without the model itself.

    The file is written atomically: an earlier one stays until the new one is complete. A symbolic link is kept. Where
    processes divide the parameters, all of them call it, and the first collects the samples in host memory and writes.

    Parameters
    ----------
    path : path
        The file. It takes about as many bytes as the parameters that vary, times the number of samples.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> import tempfile
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     posterior.save(f"{folder}/posterior.safetensors")
    ...     nb.load(f"{folder}/posterior.safetensors", model).n_samples
    10
    """
    with self._network.group.together():
        _save(self, path)


def _save(self: Any, path: str | os.PathLike[str]) -> None:
    self._check_fitted()
    self._network.check_unchanged()
    rule, network, likelihood = self._precision_rule, self._network, self._likelihood
    if likelihood.name in BUILT_IN and type(likelihood) is not type(resolve(likelihood.name)):
        msg = (
            f"{type(likelihood).__name__} has the name of a built-in likelihood, {likelihood.name!r}, and would be "
            "loaded as that one: give it a name of its own, and fit again."
        )
        raise SettingsError(msg)
    directions = self.directions if network.division is None else network.division.collected(self.directions)
    if network.group.rank:
        return
    if reason := outdated(self):
        warn(f"{reason} Until then decisions are refused, by the saved posterior as well.")
    header = {
        "kind": type(self).__name__,
        "parameters": list(zip(network.whole.names, network.whole.shapes, strict=True)),
        "fingerprint": network.fingerprint(),
        "prior_precision": self.prior_precision,
        "precision_rule": rule if isinstance(rule, str) else "",
        "likelihood": {"name": likelihood.name, **likelihood.settings()},
        "output_fn": network.output_fn is not the_output,
        "inputs": network.input_signature,
        "report": {},
        **self._header(),
    }
    header["familiar"], remembered = familiar_file.to_file(self._familiar)
    header["calibration"], ranked = calibration.to_file(self._calibration)
    io.save(path, {"directions": directions, **self._tensors(), **remembered, **ranked}, header)


def shallow_copy(self: T) -> T:
    """Return another posterior with everything in common."""
    return _with_state(type(self), vars(self))


def deep_copy(self: T, memo: dict[int, Any]) -> T:
    """Return another posterior with a model of its own; functions are the same."""
    posterior: Any = self
    posterior._network.check_whole()
    state = posterior.__getstate__()
    return _with_state(type(self), copy.deepcopy(state, memo))


def _with_state(kind: type[T], state: Mapping[str, Any]) -> T:
    new = object.__new__(kind)
    vars(new).update(state)
    return new


def reduced(self: Any, protocol: Any) -> Any:
    """Return what pickle takes along; refuse functions that it cannot name, where a file would do."""
    self._network.check_whole()
    given = {"likelihood": self._asked, "batch_fn": self._batch_fn, "output_fn": self._network.output_fn}
    for name, function in given.items():
        try:
            pickle.dumps(function)
        except Exception as error:
            msg = (
                f"pickle cannot hold {name}=..., which was not defined at the top of a module: use "
                f"posterior.save(path), and pass it again to nb.load(path, model, {name}=...)."
            )
            raise SettingsError(msg) from error
    return object.__reduce_ex__(self, protocol)


def from_file(
    kind: type[T],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    model: nn.Module,
    likelihood: Likelihood | None,
    batch_fn: BatchFn | None,
    output_fn: OutputFn | None,
) -> T:
    """Return the posterior of a class that a file holds, for a model."""
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
    make: Any = kind
    posterior = make(
        model,
        stored_likelihood(header, likelihood),
        parameters=lambda name, _: name in wanted,
        prior_precision=float(header["prior_precision"]),
        batch_fn=batch_fn,
        output_fn=output_fn,
    )
    network = posterior._network
    check_precision(tensors, network.dtype)
    check_model(header, network.names, network.shapes, network.fingerprint())
    posterior._directions = _directions(tensors, posterior._fewest, network.n_parameters, network.dtype).to(
        network.device
    )
    if header["precision_rule"]:
        posterior._precision_rule, posterior._precision = header["precision_rule"], float(header["prior_precision"])
    network.input_signature = header["inputs"]
    posterior._familiar = familiar_file.from_file(header["familiar"], tensors, network, header["report"].get("n_data"))
    posterior._calibration = calibration.from_file(header["calibration"], tensors)
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(("familiar.", "calibration."))}
    posterior._restore(own, header)
    made: T = posterior
    return made


def _directions(tensors: Mapping[str, Tensor], fewest: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the directions of the file, if they are those of samples of so many parameters."""
    directions = tensors.get("directions", torch.zeros(0))
    few = directions.ndim != 2 or len(directions) < fewest
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
