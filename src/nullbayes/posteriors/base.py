r"""What every posterior that consists of parameter samples can do: predict, score, check, tune, save.

Directions are stored without the prior precision: sample :math:`s` is :math:`\theta + v_s/\sqrt\alpha`, so that the
precision can change at no cost. A method provides the directions; nothing here depends on where they came from.
"""

from __future__ import annotations

import contextlib
import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from nullbayes import io, priors
from nullbayes.errors import NotFittedError, SettingsError
from nullbayes.jacobian.batches import BatchFn, is_array
from nullbayes.jacobian.network import Network, OutputFn, Selection, the_output
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.posteriors import held_out
from nullbayes.posteriors.arguments import check_picklable, check_precision, positive, whole, with_state
from nullbayes.posteriors.header import Fields
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Prediction, default_link, predict, score, stream

_CHUNK = 8192  # examples times samples in memory at a time


class SamplePosterior(ABC):
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
    _header_fields: ClassVar[Fields] = {}  # that a class adds to the header of its file, with their tests
    _report_fields: ClassVar[Fields] = {}  # of "report" in the header

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
        self._likelihood = self._asked = resolve(likelihood)  # as given: each fit completes it anew
        self._batch_fn = batch_fn
        self._directions: Tensor | None = None  # (S, P)
        self._kernel_dimension = 0.0
        self._precision: float | None = None
        self._precision_rule = self._asked_precision = check_precision(prior_precision)

    @abstractmethod
    def fit(self, loader: Any, targets: Any = None, n_samples: int = 30) -> Self:
        """Learn from the training data: a loader, or inputs and targets."""

    def __repr__(self) -> str:
        """Show the likelihood, and the numbers of parameters and samples."""
        samples = "" if self._directions is None else f", {len(self._directions)} samples"
        return f"{type(self).__name__}({self._likelihood.name}, {self._network.n_parameters:,} parameters{samples})"

    # --- samples ------------------------------------------------------------------------------------------------------

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; after a fit, with what it took from the training data."""
        return self._likelihood

    @property
    def directions(self) -> Tensor:
        """The directions (S, P), without the prior precision."""
        self._check_fitted()
        assert self._directions is not None
        return self._directions

    def _check_fitted(self) -> None:
        if self._directions is None:
            msg = f"{type(self).__name__} has no samples yet: call fit(loader) first."
            raise NotFittedError(msg)

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
        """Put sample ``i`` into the user's model during a ``with`` block; the trained parameters return after it.

        Examples
        --------
        >>> with posterior.sampled_parameters(0) as model:  # doctest: +SKIP
        ...     outputs = model(x)
        """
        if not -self.n_samples <= whole(i, "i") < self.n_samples:
            msg = f"There is no sample {i}: there are {self.n_samples}."
            raise SettingsError(msg)
        self._network.check_unchanged()
        values, model = self._sampled_tensors(i), self._network.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        trained = {name: named[name].data for name in values}
        try:
            for name, value in values.items():
                named[name].data = value.to(trained[name].dtype, copy=True)
            yield model
        finally:
            for name, value in trained.items():
                named[name].data = value

    def _sampled_tensors(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of the model that sample ``i`` replaces."""
        flat: Tensor = self._network.theta + self.directions[i] / self.prior_precision**0.5
        return self._network.unflatten(flat)

    # --- predictions --------------------------------------------------------------------------------------------------

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
            What the model takes: one argument, several, or named ones; or an iterable of such (targets in pairs are
            ignored). A loader that shuffles or drops examples is refused: answers come in the order of the inputs.
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
        """Return one score per input; higher means that the input is less like the training data.

        Parameters
        ----------
        x, mask, pred_type
            As for :meth:`predict`.
        kind : str
            "max_variance" (over the outputs), "sum_variance", "max_prob_variance", "entropy" or "mutual_information".
            Variances of a regression with several outputs are relative to the noise of each.
        per : "input" or "position"
            Where outputs have positions (tokens, pixels), the score of an input is the largest of its positions for the
            kinds that begin with "max", and their mean for the others; masked positions do not count. "position" gives
            the score of each position, NaN where it is masked.
        """
        at_once = is_array(x) or isinstance(x, (tuple, Mapping)) or is_array(mask) or per != "input"
        pieces = [x] if at_once else stream(x, self._network, self._batch_fn, self.n_samples)  # lengths may differ
        scores = [
            self._scored(self.predict(piece, pred_type=pred_type, mask=mask), kind, per, mask) for piece in pieces
        ]
        return torch.cat(scores)

    def _scored(self, prediction: Prediction, kind: str, per: str, mask: Mask) -> Tensor:
        """Return the score of a prediction; warn where padding may be in it."""
        if mask is None and per == "input":
            held_out.warn_of_padding(self._likelihood, prediction)
        return score(prediction, self._likelihood, kind, per)

    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, ...)
        r"""Return the variance of the linearized outputs.

        Parameters
        ----------
        x : as for ``predict``
            The inputs.
        exact : bool
            Compute :math:`J(x) \Sigma J(x)^\top` without samples and Monte Carlo error, where the method can do that.
        """
        if exact:
            msg = f"{type(self).__name__} has no exact functional variance: use exact=False."
            raise SettingsError(msg)
        return self.predict(x).variance

    # --- data with targets --------------------------------------------------------------------------------------------

    def _pieces(self, data: Any, size: int = held_out.AT_ONCE) -> Iterator[tuple[Any, Tensor]]:
        return held_out.pieces(self._network, self._batch_fn, data, size)

    def _evaluate(self, loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs (N, ...), the centred changes at precision 1 (S, N, ...), and the targets."""
        return held_out.evaluate(self._network, self._likelihood, self._batch_fn, loader, self.directions)

    @full_precision()
    def check_fit(self, loader: Any, targets: Any = None) -> held_out.FitCheck:
        """Measure how far predictions, their likelihood and accuracy moved from the network's own on some data.

        The data come as a loader, in any order, or as inputs and targets.
        """
        outputs, changes, labels = self._evaluate(loader if targets is None else (loader, targets))
        changes = changes / self.prior_precision**0.5
        return held_out.check_fit(self._likelihood, outputs, changes, labels, self._link)

    # --- scale --------------------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> float:
        r"""The prior precision :math:`\alpha` in use. It may be set; nothing is computed again.

        - "auto" is "optimal", raised as far as it takes to predict inputs like the training data as well as the network
          does. How far is measured during the fit, on training examples; see :mod:`nullbayes.posteriors.promise`.
        - "optimal" is the rank of the rows over the squared norm of the parameters, the maximum of the evidence of the
          linearized model. It becomes tiny where rows are few beside parameters, and then ruins predictions.
        - "paper" is the reciprocal of "optimal", as the paper prints it.
        - A positive number is itself.
        """
        if self._precision is None:
            self._check_fitted()
            self._precision = self._resolve_precision(self._precision_rule)
        return self._precision

    @prior_precision.setter
    def prior_precision(self, value: str | float) -> None:
        rule = check_precision(value)
        self._precision = self._resolve_precision(rule) if self._directions is not None else None
        self._precision_rule = self._asked_precision = rule

    def _resolve_precision(self, rule: str | float) -> float:
        if not isinstance(rule, str):
            return float(rule)
        return 1.0 / self._closed_form() if rule == "paper" else self._closed_form()

    def _closed_form(self) -> float:
        return priors.closed_form(self._network.n_parameters, self._kernel_dimension, self._theta_squared())

    def _theta_squared(self) -> float:
        return float(self._network.theta.double().square().sum())

    @property
    def temperature(self) -> float:
        """The temperature of the likelihood in predictions: logits are divided by it, a noise variance is multiplied.

        It may be set. After a fit it is that of the given likelihood, 1 by default, unless :meth:`tune` or
        ``fit(..., held_out=loader)`` chose another.
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

    @full_precision()
    def optimize_prior_precision(self, loader: Any = None, method: str = "nll") -> float:
        """Choose the prior precision, set it and return it; see :meth:`tune` for precision and temperature together.

        Parameters
        ----------
        loader : iterable of batches or pair (inputs, targets), optional
            Held-out data for "nll" and "grid", the training data for "marglik"; "closed_form" needs none.
        method : "nll", "grid", "marglik" or "closed_form"
            The best log-likelihood of the mean prediction on the data, among all numbers or among the paper's 0.1, 1,
            5, 10, 50 and 100; the optimum of the marginal likelihood of linearized Laplace, with the Gauss-Newton
            matrix proper; or the optimum of the projected marginal likelihood.
        """
        self._check_fitted()
        self.prior_precision = self._best_precision(held_out.check_method(loader, method), loader)
        return self.prior_precision

    def _best_precision(self, method: str, loader: Any) -> float:
        if method == "closed_form":
            return self._closed_form()
        if method == "marglik":
            return held_out.best_evidence(self._network, self._likelihood, self._batch_fn, loader)
        found = held_out.answers_on(self._likelihood, *self._evaluate(loader))
        if method == "grid":
            return held_out.best_of_grid(lambda alpha: -found.nll(alpha))
        start = self.prior_precision
        with contextlib.suppress(SettingsError):  # an earlier choice must not change the answer
            start = self._resolve_precision("optimal")
        return priors.maximize(lambda alpha: -found.nll(alpha), start, "held-out likelihood")

    @full_precision()
    def tune(self, loader: Any, targets: Any = None) -> Self:
        """Choose the prior precision and the temperature together, by the likelihood of held-out data.

        An infinite precision is temperature scaling, so on these data the result is no worse than temperature scaling,
        nor than the network itself, by more than 1e-5 nats per target. The variance is used as far as it helps by more
        than three standard errors; where it does not, it is kept as large as is harmless, so that scores still tell
        inputs apart.

        Parameters
        ----------
        loader, targets : iterable of batches, or inputs and targets
            Data that the network was not trained on, in any order; a thousand examples are plenty.
        """
        evaluated = self._evaluate(loader if targets is None else (loader, targets))
        alpha, self.temperature = held_out.tuned(held_out.answers_on(self._likelihood, *evaluated))
        self._precision = self._precision_rule = alpha  # a new fit goes by the rule that was given
        return self

    # --- files and copies ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write samples, settings and a fingerprint of the model to a safetensors file, without the model itself.

        The file is written atomically: an earlier one stays until the new one is complete. A symbolic link is kept.
        """
        self._check_fitted()
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
            "report": {},
            **self._header(),
        }
        io.save(path, {"directions": self.directions, **self._tensors()}, header)

    def _header(self) -> dict[str, Any]:
        """Return what a method adds to the header."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a method adds to the file."""
        return {}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Take back what a method added to the file."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a deep or a pickled copy takes along."""
        return dict(vars(self))

    def __copy__(self) -> Self:
        """Return another with everything in common."""
        return with_state(type(self), vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return another with a model of its own; functions are the same."""
        return with_state(type(self), copy.deepcopy(self.__getstate__(), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse functions that pickle cannot name, where a file would do."""
        check_picklable(likelihood=self._asked, batch_fn=self._batch_fn, output_fn=self._network.output_fn)
        return object.__reduce_ex__(self, protocol)
