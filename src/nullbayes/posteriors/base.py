r"""What every posterior that consists of parameter samples can do: predict, score, check, save.

Directions are stored without the prior precision: sample :math:`s` is :math:`\theta + v_s/\sqrt\alpha`, so the
precision can change at no cost. A method fills in directions; nothing here knows where they came from.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes import io
from nullbayes.errors import DataError, NotFittedError, NullBayesWarning, SettingsError
from nullbayes.jacobian.batches import BatchFn, is_array, take_examples, to_device
from nullbayes.jacobian.data import check_batch
from nullbayes.jacobian.loaders import batches
from nullbayes.jacobian.network import Network, OutputFn, Selection, the_output
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.posteriors.check import FitCheck, check_fit
from nullbayes.posteriors.copies import Copied
from nullbayes.posteriors.numbers import whole
from nullbayes.posteriors.scale import Scaled, check_precision
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Prediction, centred, default_link, joined, predict, score, stream

_AT_ONCE = 1024  # examples
_CHUNK = 8192  # examples times samples in memory at a time


class SamplePosterior(Scaled, Copied):
    """A network and a set of directions around its parameters.

    Parameters
    ----------
    model : nn.Module
        The trained network; it is never changed.
    likelihood : str, Likelihood or callable
        "classification", "binary", "multilabel", "regression", or a per-example loss.
    parameters : None, str, iterable of str, or callable
        Which parameters vary: names, globs, or a predicate (name, parameter).
    prior_precision : "auto", "optimal", "paper" or float
        See the property of that name.
    batch_fn : callable, optional
        Turns a batch of the loader into ``(inputs, targets)``.
    output_fn : callable, optional
        Takes the outputs out of what the model returns; by default its only tensor, or that called "logits".
    """

    _fewest = 2  # samples that a file may hold: as many as a variance needs
    _link = default_link("linearized")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        prior_precision: str | float = "auto",
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
    ) -> None:
        self._network = Network(model, parameters, output_fn)
        self._likelihood = self._asked = resolve(likelihood)  # as asked for: each fit fills it in anew
        self._batch_fn = batch_fn
        self._directions: Tensor | None = None  # (S, P)
        self._kernel_dimension = 0.0
        self._precision: float | None = None
        self._precision_rule = self._asked_precision = check_precision(prior_precision)

    def __repr__(self) -> str:
        """Say what it is of, and how many samples it has."""
        samples = "" if self._directions is None else f", {len(self._directions)} samples"
        return f"{type(self).__name__}({self._likelihood.name}, {self._network.n_parameters:,} parameters{samples})"

    # --- the samples -------------------------------------------------------------------------------------------

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, with what it took from the training data once fitted."""
        return self._likelihood

    @property
    def directions(self) -> Tensor:
        """The directions (S, P), without the prior precision."""
        if self._directions is None:
            msg = f"{type(self).__name__} has no samples yet: call fit(loader) first."
            raise NotFittedError(msg)
        return self._directions

    @property
    def n_samples(self) -> int:
        """The number of samples."""
        return len(self.directions)

    def _deviations(self, n_samples: int | None = None, least: int | None = None) -> Tensor:  # (S, P)
        deviations: Tensor = self._first(n_samples, least) / self.prior_precision**0.5
        return deviations

    def _first(self, n_samples: int | None = None, least: int | None = None) -> Tensor:  # (S, P)
        """Return the directions of the first samples, or of all."""
        if n_samples is not None and not 1 <= whole(n_samples) <= self.n_samples:
            more = "; extend() draws more" if hasattr(self, "extend") else ""
            msg = f"n_samples must be between {least or self._fewest} and {self.n_samples}, not {n_samples}{more}."
            raise SettingsError(msg)
        return self.directions[:n_samples]

    def sample(self, n: int | None = None) -> dict[str, Tensor]:
        """Return the parameters of the first ``n`` samples by name, stacked: (n, *shape) each."""
        return self._network.unflatten(self._network.theta + self._deviations(n, least=1))

    @contextlib.contextmanager
    def sampled_parameters(self, i: int) -> Iterator[nn.Module]:
        """Put sample ``i`` into the user's model for the time of a ``with`` block.

        The trained parameters return after it.

        Examples
        --------
        >>> with posterior.sampled_parameters(0) as model:  # doctest: +SKIP
        ...     outputs = model(x)
        """
        if not -self.n_samples <= whole(i, "i") < self.n_samples:
            msg = f"There is no sample {i}: there are {self.n_samples}."
            raise SettingsError(msg)
        self._network.check_unchanged()
        values = self._sampled_tensors(i)
        named = {**dict(self._network.model.named_parameters()), **dict(self._network.model.named_buffers())}
        trained = {name: named[name].data for name in values}
        try:
            for name, value in values.items():
                named[name].data = value.to(trained[name].dtype, copy=True)
            yield self._network.model
        finally:
            for name, value in trained.items():
                named[name].data = value

    def _sampled_tensors(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of the model that sample ``i`` replaces."""
        flat: Tensor = self._network.theta + self.directions[i] / self.prior_precision**0.5
        return self._network.unflatten(flat)

    # --- predictions ----------------------------------------------------------------------------------------------

    @full_precision()
    def predict(
        self,
        x: Any,
        *,
        pred_type: str = "linearized",
        n_samples: int | None = None,
        link_approx: str | None = None,
        mask: Mask = None,
    ) -> Prediction:
        """Predict for inputs, or for a loader of them.

        Parameters
        ----------
        x : Tensor, array, tuple, mapping, dataset or loader
            What the model takes: one argument, several, or named ones; or an iterable of such (pairs with targets are
            taken apart). A loader that shuffles or drops examples is refused: answers come in the order of the inputs.
        pred_type : "linearized" or "sampled"
            The linearized network, for which the theory holds, or the network at the sampled parameters.
        n_samples : int, optional
            Use only the first so many samples.
        link_approx : "margin", "probit", "bridge" or "mc", optional
            How probabilities are averaged over the posterior. "margin", the default for linearized predictions, shrinks
            the distance of each logit to that of the predicted class by its variance: no Monte Carlo noise, and the
            predicted class is always the network's. "probit" shrinks each logit by its own variance and "bridge" is the
            Laplace bridge, both as in laplace-torch; "mc" is the mean of the samples' probabilities, the default for
            sampled predictions. For binary and multilabel likelihoods "margin" and "probit" are the same.
        mask : Tensor (N, ...), callable (inputs) -> Tensor, or "all", optional
            True at the positions of outputs such as (N, T, C) that count; padding does not, and scores leave it out. By
            default an input's own ``attention_mask``, if it has one; "all" counts everything.
        """
        self._network.check_unchanged()
        if n_samples == 1:
            msg = "n_samples must be at least 2 to speak of a variance, not 1; sample(1) gives the parameters of one."
            raise SettingsError(msg)
        return predict(
            self._network,
            self._likelihood,
            x,
            self._first(n_samples),
            root=self.prior_precision**0.5,
            pred_type=pred_type,
            link=link_approx,
            batch_fn=self._batch_fn,
            mask=mask,
        )

    __call__ = predict

    def ood_score(
        self,
        x: Any,
        kind: str = "max_variance",
        *,
        per: str = "input",
        mask: Mask = None,
        pred_type: str = "linearized",
    ) -> Tensor:  # (N,) or (N, ...)
        """Return one number an input: higher is stranger.

        Parameters
        ----------
        x, mask, pred_type
            As for :meth:`predict`.
        kind : str
            "max_variance" (over the outputs), "sum_variance", "max_prob_variance", "entropy" or "mutual_information".
            Variances of a regression with several outputs are relative to the noise of each.
        per : "input" or "position"
            Where outputs have positions (tokens, pixels), one number an input is the largest of its positions for
            the kinds that begin with "max", and their mean for the others; masked positions do not count. "position"
            gives the number of each, NaN where it is masked.
        """
        whole = is_array(x) or isinstance(x, (tuple, Mapping)) or is_array(mask) or per != "input"
        pieces = [x] if whole else stream(x, self._network, self._batch_fn, self.n_samples)  # of lengths of their own
        scores = [
            self._scored(self.predict(piece, pred_type=pred_type, mask=mask), kind, per, mask) for piece in pieces
        ]
        return torch.cat(scores)

    def _scored(self, prediction: Prediction, kind: str, per: str, mask: Mask) -> Tensor:
        """Return the score of a prediction; warn where padding may be in it."""
        likelihood = self._likelihood
        if mask is None and per == "input" and len(likelihood.positions(prediction.mean)) > 1:
            message = ""
            if likelihood.some_ignored and prediction.mask is None:
                message = (
                    "Training targets ignored some positions (padding?), but these inputs come without a mask, so "
                    "every position counts in their scores."
                )
            elif likelihood.more_ignored:
                message = (
                    "Training targets ignored positions that attention_mask counts (special tokens, parts of words?). "
                    "Nothing holds the outputs there, and they count in these scores."
                )
            if message:
                advice = 'Pass mask=..., true where a position counts, or mask="all".'
                warnings.warn(f"{message} {advice}", NullBayesWarning, stacklevel=3)
        return score(prediction, self._likelihood, kind, per)

    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, O)
        """Return the variance of the linearized outputs; ``exact=True`` where a method can do without samples."""
        if exact:
            msg = f"{type(self).__name__} has no exact functional variance: use exact=False."
            raise SettingsError(msg)
        return self.predict(x).variance

    def _evaluate(self, loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs (N, ...), the centred change at precision 1 (S, N, ...), and the targets."""
        outputs, changes, targets = [], [], []
        for x, y in self._pieces(loader, max(1, _CHUNK // self.n_samples)):
            own, change = linearized(self._network, x, self.directions)
            self._likelihood.check(own, y)
            outputs.append(own)
            changes.append(centred(change))
            targets.append(y)
        return joined(outputs), torch.cat(changes, dim=1), torch.cat(targets)

    def _pieces(self, data: Any, size: int = _AT_ONCE) -> Iterator[tuple[Any, Tensor]]:
        """Iterate once over inputs and targets, so many at a time and in whatever order they come."""
        self._network.check_unchanged()
        empty = True
        for number, (x, y) in enumerate(batches(data, self._batch_fn, self._network.dtype)):
            check_batch(number, x, y)
            self._network.check_form(x)
            empty = False
            for start in range(0, len(y), size):
                piece = take_examples(x, start, start + size), y[start : start + size]
                moved: tuple[Any, Tensor] = to_device(piece, self._network.device)
                yield moved
        if empty:
            msg = "The loader is empty: it yields no batch."
            raise DataError(msg)

    @full_precision()
    def check_fit(self, loader: Any, targets: Any = None) -> FitCheck:
        """Measure how far predictions, their likelihood and accuracy moved from the network's own on some data.

        The data come as a loader, in any order, or as inputs and targets.
        """
        outputs, changes, labels = self._evaluate(loader if targets is None else (loader, targets))
        return check_fit(self._likelihood, outputs, changes / self.prior_precision**0.5, labels, self._link)

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write samples, settings and a fingerprint of the model to a safetensors file, without the model itself.

        The file is there whole or not at all, and an earlier one stays until then; a symbolic link stays a link.
        """
        _ = self.directions  # says what to do before fit
        self._network.check_unchanged()
        header = {
            "kind": type(self).__name__,
            "parameters": list(zip(self._network.names, self._network.shapes, strict=True)),
            "fingerprint": self._network.fingerprint(),
            "prior_precision": self.prior_precision,
            "precision_rule": self._precision_rule if isinstance(self._precision_rule, str) else "",
            "kernel_dimension": self._kernel_dimension,
            "likelihood": {"name": self._likelihood.name, **self._likelihood.settings()},
            "output_fn": self._network.output_fn is not the_output,
            "inputs": self._network.input_signature,
            **self._header(),
        }
        io.save(path, {"directions": self.directions, **self._tensors()}, header)

    def _functions(self) -> dict[str, Any]:
        return {"likelihood": self._asked, "batch_fn": self._batch_fn, "output_fn": self._network.output_fn}

    def _header(self) -> dict[str, Any]:
        """Return what a method adds to the header."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a method adds to the file."""
        return {}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Take up what a method added to the file."""
