"""Posteriors: a network, samples around its parameters, and what they say about predictions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from nullbayes import io
from nullbayes.errors import FileError, ModelError, NullBayesError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import OutputFn
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.posteriors.base import SamplePosterior as SamplePosterior
from nullbayes.posteriors.checking import FitCheck as FitCheck
from nullbayes.posteriors.checkpoint import KIND as _CHECKPOINT
from nullbayes.posteriors.files import from_file
from nullbayes.posteriors.header import altered, check_header
from nullbayes.posteriors.projected import LossProjectedPosterior as LossProjectedPosterior
from nullbayes.posteriors.projected import ProjectedPosterior as ProjectedPosterior
from nullbayes.posteriors.report import FitReport as FitReport


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
        Only for a loss or a likelihood of your own, which a file cannot hold. Of a likelihood it holds the settings.
    batch_fn, output_fn : callable, optional
        As when it was fitted.

    Returns
    -------
    SamplePosterior
        A posterior of the class that was saved. It predicts at once; to ``extend`` it, ``prepare`` it first.

    Raises
    ------
    FileError
        If the file is damaged, was altered, or belongs to a model with other parameters.

    Notes
    -----
    A posterior of a class of your own can be loaded once the module that defines the class has been imported.

    Examples
    --------
    >>> import tempfile, torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(4, 2, bias=False), torch.eye(4)
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], torch.tensor([0, 1]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     posterior.save(f"{folder}/posterior.safetensors")
    ...     loaded = nb.load(f"{folder}/posterior.safetensors", model)
    >>> loaded, bool((loaded.directions == posterior.directions).all())
    (ProjectedPosterior(classification, 8 parameters, 30 samples), True)
    """
    asked = None if likelihood is None else resolve(likelihood)
    if not isinstance(model, nn.Module):
        msg = f"model must be a torch.nn.Module, not {type(model).__name__}."
        raise ModelError(msg)
    tensors, header = io.read(path)
    if header.get("kind") == _CHECKPOINT:
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
