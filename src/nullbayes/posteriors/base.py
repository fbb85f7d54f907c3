r"""What every posterior that consists of parameter samples can do: predict, score, check, save.

Directions are stored without the prior precision: sample :math:`s` is :math:`\theta + v_s/\sqrt\alpha`, so the
precision can change at no cost. A method fills in directions; nothing here knows where they came from.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from nullbayes import io, priors
from nullbayes.errors import DataError, NotFittedError, SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network, OutputFn, Selection, the_output
from nullbayes.jacobian.products import linearized
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.posteriors.copies import Copied
from nullbayes.posteriors.numbers import positive, whole
from nullbayes.posteriors.promise import Answers, best_scale
from nullbayes.posteriors.report import FitCheck
from nullbayes.precision import full_precision
from nullbayes.predictive import Prediction, centred, default_link, nll, predict, score, summarize

_CHUNK = 8192  # examples times samples in memory at a time


class SamplePosterior(Copied):
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
        self._precision_rule = self._asked_precision = _check_precision(prior_precision)

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

    @property
    def prior_precision(self) -> float:
        r"""The prior precision :math:`\alpha` in use.

        May be set, and nothing is computed again:

        - "auto" is "optimal", raised as far as it takes to predict inputs like the training data as well as the network
          does. How far is measured during the fit, on training examples; see :mod:`nullbayes.posteriors.promise`.
        - "optimal" is the rank of the rows over the squared norm of the parameters, the maximum of the evidence of the
          linearized model. It becomes tiny where rows are few beside parameters, and then ruins predictions.
        - "paper" is the reciprocal of "optimal", as the paper prints it.
        - A positive number is itself.
        """
        if self._precision is None:
            _ = self.directions  # says what to do
            self._precision = self._resolve_precision(self._precision_rule)
        return self._precision

    @prior_precision.setter
    def prior_precision(self, value: str | float) -> None:
        rule = _check_precision(value)
        self._precision = self._resolve_precision(rule) if self._directions is not None else None
        self._precision_rule = self._asked_precision = rule

    def _resolve_precision(self, rule: str | float) -> float:
        if not isinstance(rule, str):
            return float(rule)
        optimal = priors.closed_form(self._network.n_parameters, self._kernel_dimension, self._theta_squared())
        return 1.0 / optimal if rule == "paper" else optimal

    @property
    def temperature(self) -> float:
        """The temperature of the likelihood in predictions: logits are divided by it, a noise variance is multiplied.

        After a fit it is that of the likelihood as it was given, 1 by default, unless ``fit(..., held_out=loader)`` or
        :meth:`tune` chose another; may be set.
        """
        return self._likelihood.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        number = positive(value)
        if number is None:
            msg = f"temperature must be a positive number, not {value!r}."
            raise SettingsError(msg)
        if number != self._likelihood.temperature:
            self._likelihood = self._likelihood.tempered(number)

    def _theta_squared(self) -> float:
        return float(self._network.theta.double().square().sum())

    def _deviations(self, n_samples: int | None = None) -> Tensor:  # (S, P)
        deviations: Tensor = self._first(n_samples) / self.prior_precision**0.5
        return deviations

    def _first(self, n_samples: int | None = None) -> Tensor:  # (S, P)
        """Return the directions of the first samples, or of all."""
        if n_samples is not None and not 1 <= whole(n_samples) <= self.n_samples:
            more = "; extend() draws more" if hasattr(self, "extend") else ""
            msg = f"n_samples must be between 1 and {self.n_samples}, not {n_samples}{more}."
            raise SettingsError(msg)
        return self.directions[:n_samples]

    def sample(self, n: int | None = None) -> dict[str, Tensor]:
        """Return the parameters of the first ``n`` samples by name, stacked: (n, *shape) each."""
        return self._network.unflatten(self._network.theta + self._deviations(n))

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
        self, x: Any, *, pred_type: str = "linearized", n_samples: int | None = None, link_approx: str | None = None
    ) -> Prediction:
        """Predict for inputs, or for a loader of them.

        Parameters
        ----------
        x : Tensor, tuple, mapping, or loader
            What the model takes: one argument, several, or named ones; or an iterable of such (pairs with targets are
            taken apart).
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
        )

    __call__ = predict

    def ood_score(self, x: Any, kind: str = "max_variance", *, pred_type: str = "linearized") -> Tensor:  # (N,)
        """Return one number an input: higher is stranger.

        ``kind`` is "max_variance" (over the outputs), "sum_variance", "max_prob_variance", "entropy" or
        "mutual_information".
        """
        return score(self.predict(x, pred_type=pred_type), self._likelihood, kind)

    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, O)
        """Return the variance of the linearized outputs; ``exact=True`` where a method can do without samples."""
        if exact:
            msg = f"{type(self).__name__} has no exact functional variance: use exact=False."
            raise SettingsError(msg)
        return self.predict(x).variance

    def _evaluate(self, loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs (N, ...), the centred change at precision 1 (S, N, ...), and the targets."""
        self._network.check_unchanged()
        examples = Examples(loader, self._batch_fn, self._network.device)
        outputs, changes, targets = [], [], []
        for start, stop in examples.ranges(max(1, _CHUNK // self.n_samples)):
            x, y = examples.read(start, stop)
            own, change = linearized(self._network, x, self.directions)
            self._likelihood.check(own, y)
            outputs.append(own)
            changes.append(centred(change))
            targets.append(y)
        return torch.cat(outputs), torch.cat(changes, dim=1), torch.cat(targets)

    @full_precision()
    def check_fit(self, loader: Iterable[Any]) -> FitCheck:
        """Measure how far predictions, their likelihood and accuracy moved from the network's own on some data."""
        outputs, changes, targets = self._evaluate(loader)
        changes = changes / self.prior_precision**0.5
        counted, likelihood = self._counted(outputs, targets), self._likelihood
        shift = changes.mean(0)[counted]
        mean, changes = outputs + changes.mean(0), centred(changes)
        return FitCheck(
            n_data=len(outputs),
            mean_shift=float(shift.square().mean().sqrt()),
            max_shift=float(shift.abs().max()),
            std=float(changes.var(0)[counted].mean().sqrt()),
            output_std=likelihood.spread(outputs, targets),
            nll_model=nll(likelihood, outputs, None, targets),
            nll_posterior=nll(likelihood, mean, changes, targets, self._link),
            accuracy_model=self._accuracy(outputs, None, targets),
            accuracy_posterior=self._accuracy(mean, changes, targets),
        )

    def _counted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which outputs the targets speak of; refuse targets that speak of none."""
        counted = self._likelihood.counted(outputs, targets)
        counted = torch.ones_like(outputs, dtype=torch.bool) if counted is None else counted
        if not bool(counted.any()):
            msg = "Every target is one to be ignored (ignore_index): there is nothing to compare predictions with."
            raise DataError(msg)
        return counted

    def _accuracy(self, mean: Tensor, changes: Tensor | None, targets: Tensor) -> float | None:
        likelihood = self._likelihood
        if not likelihood.has_probabilities:
            return None
        if changes is None:
            return likelihood.accuracy(likelihood.probabilities(mean), targets)
        probs = summarize(mean, changes, likelihood, self._link).probs
        assert probs is not None
        return likelihood.accuracy(probs, targets)

    # --- prior precision and temperature ------------------------------------------------------------------------------

    def _tune_nll(self, loader: Iterable[Any]) -> float:
        outputs, changes, targets = self._evaluate(loader)
        self._counted(outputs, targets)
        found = Answers(self._likelihood, outputs, changes, targets)
        start = self.prior_precision
        with contextlib.suppress(SettingsError):  # whatever was found before: the answer depends on the data alone
            start = self._resolve_precision("optimal")
        return priors.maximize(lambda alpha: -found.nll(alpha), start, "held-out likelihood")

    @full_precision()
    def tune(self, loader: Iterable[Any]) -> Self:
        """Choose the prior precision and the temperature together, by the likelihood of held-out data.

        An infinite precision is temperature scaling, so that on these data the result is no worse than temperature
        scaling, nor than the network itself, by more than 1e-5 nats a target. The variance is used as far as it helps
        by more than three standard errors; where it does not, it is kept as large as it can be without doing harm, so
        that scores still tell inputs apart.

        Parameters
        ----------
        loader : iterable of batches
            Data that the network was not trained on; a thousand examples are plenty.
        """
        outputs, changes, targets = self._evaluate(loader)
        self._counted(outputs, targets)
        alpha, temperature = best_scale(Answers(self._likelihood, outputs, changes, targets))
        asked = self._asked_precision  # which a new fit goes by
        self.prior_precision, self.temperature = alpha, temperature
        self._asked_precision = asked
        return self

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
            "inputs": self._network.trained_on,
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


def _check_precision(value: str | float) -> str | float:
    if isinstance(value, str):
        if value in ("auto", "optimal", "paper"):
            return value
    elif (number := positive(value)) is not None:
        return number
    msg = f'prior_precision must be a positive number, "auto", "optimal" or "paper", not {value!r}.'
    raise SettingsError(msg)
