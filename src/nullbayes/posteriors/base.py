r"""What every posterior that consists of parameter samples can do: predict, score, check, tune, save.

Directions are stored without the prior precision: sample :math:`s` is :math:`\theta + v_s/\sqrt\alpha`, so that the
precision can change at no cost. A method provides the directions; nothing here depends on where they came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from nullbayes import decisions
from nullbayes.errors import NotFittedError, SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.posteriors import checking, files, predictions, scale, scoring
from nullbayes.posteriors.arguments import check_precision, positive, whole
from nullbayes.posteriors.header import Fields


class SamplePosterior(ABC):
    """A network and a set of directions around its parameters; abstract: a subclass says how to ``fit``.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        As for :class:`ProjectedPosterior <nullbayes.ProjectedPosterior>`.
    """

    _fewest = 2  # samples that a file may hold: as many as a variance needs
    _pred_type = "linearized"  # of predictions by default
    _header_fields: ClassVar[Fields] = {}  # that a class adds to the header of its file, with their tests
    _report_fields: ClassVar[Fields] = {}  # of "report" in the header
    _familiar: decisions.Familiar | None = None  # what a fit remembers of the training data
    _calibration: decisions.Calibration | None = None

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
        self._precision: float | None = None
        self._precision_rule = self._asked_precision = check_precision(prior_precision)

    @abstractmethod
    def fit(self, loader: Any, targets: Any = None, n_samples: int = 30) -> Self:
        """Learn from the training data: a loader, or inputs and targets."""

    def __repr__(self) -> str:
        """Show the likelihood, and the numbers of parameters and samples."""
        samples = "" if self._directions is None else f", {len(self._directions)} samples"
        return (
            f"{type(self).__name__}({self._likelihood.name}, {self._network.whole.n_parameters:,} parameters{samples})"
        )

    # --- samples ------------------------------------------------------------------------------------------------------

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; after a fit, with what it took from the training data."""
        return self._likelihood

    @property
    def directions(self) -> Tensor:
        """The directions (S, P), without the prior precision; if parameters are divided, those of this process."""
        return self._check_fitted()

    def _check_fitted(self) -> Tensor:
        """Return the samples that are held, or refuse to go on without a fit."""
        if self._directions is None:
            msg = f"{type(self).__name__} is not fitted yet: call fit(loader) first."
            raise NotFittedError(msg)
        return self._directions

    def _need_samples(self) -> None:
        """Refuse to predict without samples."""
        self._check_fitted()

    @property
    def n_samples(self) -> int:
        """The number of samples."""
        return len(self.directions)

    def _deviations(self, n_samples: int | None = None, least: int | None = None) -> Tensor:  # (S, P)
        deviations: Tensor = self._first(n_samples, least) / self.prior_precision**0.5
        return deviations

    def _first(self, n_samples: int | None = None, least: int | None = None) -> Tensor:  # (S, P)
        """Return the directions of the first samples, or of all."""
        fewest = max(1, self._fewest) if least is None else least
        if n_samples is not None and not fewest <= whole(n_samples) <= self.n_samples:
            more = "; extend() draws more" if hasattr(self, "extend") else ""
            more = "; sample(1) gives the parameters of one, which has no variance" if n_samples == 1 else more
            msg = f"n_samples must be between {fewest} and {self.n_samples}, not {n_samples}{more}."
            raise SettingsError(msg)
        return self.directions[:n_samples]

    sample, sampled_parameters = predictions.sample, predictions.sampled_parameters

    def _sampled_tensors(self, i: int) -> dict[str, Tensor]:
        """Return the tensors of the model that sample ``i`` replaces."""
        network = self._network
        deviation = network.all_columns(self.directions[i]) / self.prior_precision**0.5
        return network.whole.unflatten(network.whole.theta + deviation)

    # --- predictions --------------------------------------------------------------------------------------------------

    predict, _predict = predictions.predict, predictions.predict_outputs
    __call__ = predict
    ood_score, scores = scoring.ood_score, property(scoring.scores)
    _scored, _scoring = scoring.scored, property(scoring.scores_of_samples)

    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, ...)
        r"""Return the variance of the linearized outputs.

        Parameters
        ----------
        x : as for :meth:`predict`
            The inputs.
        exact : bool
            Return :math:`J(x) \Sigma J(x)^\top` without Monte Carlo error. Methods that cannot compute it refuse.

        Returns
        -------
        Tensor (N, ...)
            One variance per output.
        """
        if exact:
            msg = f"{type(self).__name__} has no exact functional variance: use exact=False."
            raise SettingsError(msg)
        return self.predict(x).variance

    # --- decisions ----------------------------------------------------------------------------------------------------

    calibrate, calibration = decisions.calibrate, property(decisions.calibration_of)
    p_value, is_ood = decisions.p_value, decisions.is_ood
    predict_set, predict_interval = decisions.predict_set, decisions.predict_interval

    def _remember(self, rows: Any) -> None:
        """Take what decisions need to know of the training data."""
        self._familiar, self._calibration = decisions.remember(rows.network, rows.examples), None

    # --- data with targets --------------------------------------------------------------------------------------------

    def _pieces(self, data: Any, size: int = checking.AT_ONCE, purpose: str = "") -> Iterator[tuple[Any, Tensor]]:
        """Iterate over inputs and targets; warn of training data if they do not serve the ``purpose``."""
        pieces = checking.pieces(self._network, self._batch_fn, data, size)
        return scale.noted(self, pieces, purpose) if purpose else pieces

    def _evaluate(self, loader: Iterable[Any], purpose: str = "") -> tuple[Tensor, Tensor, Tensor]:
        """Return the network's outputs (N, ...), the centred changes at precision 1 (S, N, ...), and the targets."""
        pieces = self._pieces(loader, max(1, checking.CHUNK // len(self.directions)), purpose)
        return checking.evaluate(self._network, self._likelihood, pieces, self.directions)

    check_fit = checking.check_fit

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
        """Return the precision that a rule stands for."""
        return float(rule)

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

    optimize_prior_precision, tune = scale.optimize_prior_precision, scale.tune

    # --- files and copies ---------------------------------------------------------------------------------------------

    save = files.save
    __copy__, __deepcopy__, __reduce_ex__ = files.shallow_copy, files.deep_copy, files.reduced

    def _header(self) -> dict[str, Any]:
        """Return what a method adds to the header."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a method adds to the file."""
        return {}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Take back what a method added to the file."""
