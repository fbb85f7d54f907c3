"""A posterior's prediction as a program that runs without this library: ``torch.export`` and ONNX.

The program computes, for each input, the mean and the variance of the outputs over a fixed number of samples, the
probabilities, and one score: what ``posterior.predict`` and ``posterior.ood_score`` return. It holds the samples, so
that it is as large as the parameters times the number of samples.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import DataError, ModelError, SettingsError
from nullbayes.jacobian.batches import as_tensors, leaves, n_examples, to_device
from nullbayes.jacobian.products import centred
from nullbayes.jacobian.tracing import trace_linearized
from nullbayes.predictive import Masks, default_score, scores_of
from nullbayes.predictive import score as score_of


@dataclass(frozen=True)
class ExportedPrediction:
    """A prediction as a program.

    Attributes
    ----------
    program : torch.export.ExportedProgram
        It takes the tensors of the inputs one after another, and returns a tuple of tensors. ``torch.export.save``
        writes it to a file.
    inputs, outputs : tuple of str
        The names of what it takes and returns: "mean", "variance", "probs" if the likelihood has probabilities, and
        "score".
    score : str
        The kind of the score.
    dynamic_batch : bool
        Whether it takes any number of examples, or as many as it was exported with.
    """

    program: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    score: str
    dynamic_batch: bool

    def __call__(self, x: Any) -> dict[str, Tensor]:
        """Run the program.

        Parameters
        ----------
        x : Tensor, tuple or mapping
            The inputs, in the form in which they were exported. Those of a mapping are taken by their names.

        Returns
        -------
        dict of Tensor
            The outputs by name. An input whose ``attention_mask`` is 0 everywhere has no finite score.

        Raises
        ------
        DataError
            If inputs have other names than those that were exported.
        """
        given = _named(x)
        if set(given) != set(self.inputs):
            msg = f"The program takes {', '.join(self.inputs)}, not {', '.join(given)}: pass inputs as for export."
            raise DataError(msg)
        with torch.no_grad():
            found = self.program.module()(*(given[name] for name in self.inputs))  # a mapping may have any order
        return dict(zip(self.outputs, found, strict=True))

    def to_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the program as an ONNX file, whose inputs and outputs have the names of this one.

        Parameters
        ----------
        path : path
            The file, such as "posterior.onnx". Large ones get a second file beside it, for their tensors.

        Raises
        ------
        ModelError
            If an operation has no form in ONNX.
        """
        try:
            import onnxscript  # noqa: F401 - what torch.onnx needs
        except ImportError as error:
            msg = "ONNX files need onnx and onnxscript: pip install 'nullbayes[onnx]'."
            raise ModelError(msg) from error
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch and onnxscript, about themselves
                made = torch.onnx.export(self.program, dynamo=True, verbose=False)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            msg = f"An operation of this network has no form in ONNX: {str(cause).partition(chr(10))[0]}"
            raise ModelError(msg) from error
        assert made is not None
        graph = made.model.graph
        for i, node in enumerate(graph):  # a value inside may have the name of an output
            for j, value in enumerate(node.outputs):
                value.name = f"value_{i}_{j}"
        for value, name in zip((*graph.inputs, *graph.outputs), (*self.inputs, *self.outputs), strict=True):
            value.name = name
        made.save(os.fspath(path))


def export(
    posterior: Any,
    example_inputs: Any,
    *,
    n_samples: int | None = None,
    score: str | None = None,
    dynamic_batch: bool = True,
) -> ExportedPrediction:
    """Return the linearized prediction of a posterior as a program of plain tensor operations.

    Parameters
    ----------
    posterior : ProjectedPosterior or LossProjectedPosterior
        A fitted posterior. Its precision and temperature go into the program as they are now.
    example_inputs : Tensor, array, tuple or mapping
        Two or more inputs, in the form that ``posterior.predict`` takes.
    n_samples : int, optional
        Use only the first so many samples; by default all of them.
    score : str, optional
        A kind of score of ``posterior.ood_score``; by default "entropy", or "max_variance" for likelihoods
        without probabilities. The calibrated score "combined" looks training examples up, and cannot be exported.
    dynamic_batch : bool
        Whether the program takes any number of inputs. Some networks can be exported for a fixed number alone.

    Returns
    -------
    ExportedPrediction
        The program, with the names of its inputs and outputs, and ``to_onnx(path)``.

    Raises
    ------
    ModelError
        If an operation of the network cannot be exported.

    Examples
    --------
    >>> import torch, nullbayes as nb
    >>> from nullbayes.integrations.export import export
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(20, 4), torch.arange(20) % 3
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:10], y[:10], progress=False)
    >>> exported = export(posterior, x[:2])
    >>> found, prediction = exported(x[10:]), posterior.predict(x[10:])
    >>> list(found), torch.allclose(found["variance"], prediction.variance, rtol=1e-3)
    (['mean', 'variance', 'probs', 'score'], True)
    """
    if not isinstance(posterior, (nb.ProjectedPosterior, nb.LossProjectedPosterior)):
        msg = (
            f"Only nb.ProjectedPosterior and nb.LossProjectedPosterior can be exported, not {type(posterior).__name__}."
        )
        raise SettingsError(msg)
    likelihood, network = posterior.likelihood, posterior._network
    kind = default_score(likelihood) if score is None else score
    if kind not in scores_of(likelihood):
        hint = ', which looks training examples up ("combined")' if kind == "combined" else ""
        msg = f"score must be one of {', '.join(scores_of(likelihood))}, not {kind!r}{hint}."
        raise SettingsError(msg)
    network.check_unchanged()
    network.check_whole()
    x = to_device(as_tensors(example_inputs, network.dtype), network.device)
    network.check_form(x)
    if n_examples(x) < 2:
        msg = "Pass at least two example inputs: the number one would be taken for a constant."
        raise DataError(msg)

    def finish(inputs: Any, mean: Tensor, changes: Tensor) -> tuple[Tensor, ...]:
        masks = Masks(likelihood, None)  # the attention_mask of the inputs, as for predict
        masks.look(inputs, mean)
        found = _finished(likelihood, kind, mean, centred(changes), masks.joined(mean))
        return (*map(network.as_returned, found[:-1]), found[-1])

    vectors = posterior._deviations(n_samples)
    graph = trace_linearized(network, x, vectors, finish, any_number=dynamic_batch)
    tensors = tuple(leaves(x))
    sizes = tuple({0: torch.export.Dim("batch", min=1)} for _ in tensors) if dynamic_batch else None
    program = torch.export.export(
        graph, tensors, dynamic_shapes=sizes, prefer_deferred_runtime_asserts_over_guards=True
    )
    names = ("mean", "variance", *(["probs"] if likelihood.has_probabilities else []), "score")
    return ExportedPrediction(program, tuple(_named(x)), names, kind, dynamic_batch)


def _finished(likelihood: Any, kind: str, mean: Tensor, changes: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return mean, variance, probabilities if there are any, and score."""
    variance, probs = changes.square().sum(0) / (len(changes) - 1), None
    if likelihood.has_probabilities:
        probs = likelihood.probabilities(mean, likelihood.link_variance(mean, changes))
    noise = likelihood.noise_variance(mean)
    made = nb.Prediction(mean, variance, probs, mean + changes, noise, mask, likelihood.name)
    found = score_of(made, likelihood, kind)
    return (mean, variance, found) if probs is None else (mean, variance, probs, found)


def _named(x: Any) -> dict[str, Tensor]:
    """Return the tensors of the inputs by name: "input", the key of a mapping, or a number; "a.b" where nested."""
    parts = x
    if not isinstance(x, Mapping):
        listed = x if isinstance(x, (tuple, list)) else [x]
        parts = {"input" if len(listed) == 1 else f"input_{i}": part for i, part in enumerate(listed)}
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            found[str(name)] = part
        elif isinstance(part, (Mapping, tuple, list)):
            found |= {f"{name}.{inner}": tensor for inner, tensor in _named(part).items()}
    return found
