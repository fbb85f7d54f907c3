"""The scale of a posterior: its prior precision and its temperature, given or chosen."""

from __future__ import annotations

import contextlib
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from nullbayes import priors
from nullbayes.errors import NullBayesWarning, SettingsError
from nullbayes.jacobian.batches import BatchFn, is_array
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.check import counted_outputs
from nullbayes.posteriors.numbers import positive
from nullbayes.posteriors.promise import TEMPERATURES, Answers, best_scale
from nullbayes.precision import full_precision

METHODS = ("nll", "grid", "marglik", "closed_form")
GRID = (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)  # of the paper


class Scaled:
    """What is known of the scale of directions; abstract: a subclass has the directions, and evaluates them."""

    _network: Network
    _likelihood: Likelihood
    _batch_fn: BatchFn | None
    _directions: Tensor | None  # (S, P)
    _kernel_dimension: float
    _precision: float | None
    _precision_rule: str | float
    _asked_precision: str | float

    @property
    @abstractmethod
    def directions(self) -> Tensor:
        """The directions (S, P), without the prior precision."""

    @abstractmethod
    def _evaluate(self, loader: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs (N, ...), the centred change at precision 1 (S, N, ...), and the targets."""

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
        rule = check_precision(value)
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

    def _held_out_nll(self, loader: Iterable[Any]) -> Callable[[float], float]:
        """Return the likelihood of held-out data as a function of the precision."""
        outputs, changes, targets = self._evaluate(loader)
        counted_outputs(self._likelihood, outputs, targets)
        found = Answers(self._likelihood, outputs, changes, targets)
        return lambda alpha: -found.nll(alpha)

    @full_precision()
    def optimize_prior_precision(self, loader: Any = None, method: str = "nll") -> float:
        """Choose the prior precision, set it and return it.

        Parameters
        ----------
        loader : iterable of batches or pair (inputs, targets), optional
            Held-out data for "nll" and "grid", the training data for "marglik"; "closed_form" needs none.
        method : "nll", "grid", "marglik" or "closed_form"
            The best log-likelihood of the mean prediction on the data, among all numbers or among the paper's 0.1, 1,
            5, 10, 50 and 100; the optimum of the marginal likelihood of linearized Laplace, with the Gauss-Newton
            matrix proper; or the optimum of the projected marginal likelihood.

        See Also
        --------
        tune : precision and temperature together.
        """
        _ = self.directions  # says what to do before fit
        best = self._best_precision(check_method(loader, method), loader)
        self.prior_precision = best
        return best

    def _best_precision(self, method: str, loader: Any) -> float:
        """Return what a method chooses."""
        if method == "closed_form":
            return Scaled._resolve_precision(self, "optimal")
        if method == "marglik":
            return self._best_evidence(loader)
        objective = self._held_out_nll(loader)
        if method == "grid":
            return best_of_grid(objective)
        start = self.prior_precision
        with contextlib.suppress(SettingsError):  # whatever was found before: the answer depends on the data alone
            start = self._resolve_precision("optimal")
        return priors.maximize(objective, start, "held-out likelihood")

    def _best_evidence(self, loader: Any) -> float:
        """Return the precision of the largest marginal likelihood on the training data."""
        if loader is None:
            msg = 'method="marglik" reads the training data: pass them, optimize_prior_precision(loader, "marglik").'
            raise SettingsError(msg)
        self._network.check_unchanged()
        examples = Examples(loader, self._batch_fn, self._network.device, dtype=self._network.dtype)
        rows = OutputJacobian(self._network, examples, self._likelihood, hessian=True)
        return priors.best_evidence(*priors.spectrum(rows, torch.Generator().manual_seed(0)), self._theta_squared())

    @full_precision()
    def tune(self, loader: Any, targets: Any = None) -> Self:
        """Choose the prior precision and the temperature together, by the likelihood of held-out data.

        An infinite precision is temperature scaling, so that on these data the result is no worse than temperature
        scaling, nor than the network itself, by more than 1e-5 nats a target. The variance is used as far as it helps
        by more than three standard errors; where it does not, it is kept as large as it can be without doing harm, so
        that scores still tell inputs apart.

        Parameters
        ----------
        loader, targets : iterable of batches, or inputs and targets
            Data that the network was not trained on, in any order; a thousand examples are plenty.
        """
        outputs, changes, labels = self._evaluate(loader if targets is None else (loader, targets))
        counted_outputs(self._likelihood, outputs, labels)
        alpha, temperature = best_scale(Answers(self._likelihood, outputs, changes, labels))
        if self._likelihood.has_probabilities and temperature < 1.01 * TEMPERATURES[0]:
            message = (
                "The held-out data do not determine a temperature: their likelihood still rises at the edge of the "
                f"search, at {temperature:.2g}. Are all of them predicted right? Pass more, or set "
                "posterior.temperature = 1.0; scores of probabilities tell nothing apart else."
            )
            warnings.warn(message, NullBayesWarning, stacklevel=3)
        asked = self._asked_precision  # which a new fit goes by
        self.prior_precision, self.temperature = alpha, temperature
        self._asked_precision = asked
        return self


def check_precision(value: str | float) -> str | float:
    """Return a precision or the name of a rule for it, or say what it may be."""
    if isinstance(value, str):
        if value in ("auto", "optimal", "paper"):
            return value
    elif (number := positive(value)) is not None:
        return number
    msg = f'prior_precision must be a positive number, "auto", "optimal" or "paper", not {value!r}.'
    raise SettingsError(msg)


def check_method(loader: Any, method: str) -> str:
    """Return the name of a way to choose a precision, or say which there are and what they need."""
    if is_array(method):
        msg = "Inputs and targets are passed as one pair here: optimize_prior_precision((x, y))."
        raise SettingsError(msg)
    if method not in METHODS:
        msg = f"method must be one of {', '.join(METHODS)}, not {method!r}."
        raise SettingsError(msg)
    if loader is None and method in ("nll", "grid"):
        msg = f"method={method!r} needs held-out data: optimize_prior_precision(held_out, {method!r})."
        raise SettingsError(msg)
    return method


def best_of_grid(objective: Callable[[float], float]) -> float:
    """Return the number of the paper's grid at which an objective is largest."""
    values = {alpha: objective(alpha) for alpha in GRID}
    return max(values, key=lambda alpha: values[alpha] if math.isfinite(values[alpha]) else -math.inf)
