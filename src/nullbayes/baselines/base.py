"""A posterior class around one :class:`Method <nullbayes.baselines.method.Method>`."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Never, Self, Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.fitting import Fitted, Learn, draw, run_fit
from nullbayes.baselines.method import (
    DEFAULT_PRECISION,
    REPORT_FIELDS,
    BaselineReport,
    FitOptions,
    LikelihoodLike,
    Method,
    Question,
    rows_at,
)
from nullbayes.baselines.tuning import CONFIDENT, best_by_likelihood, best_evidence, check_how, check_prior
from nullbayes.errors import FileError, NotFittedError, SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.linalg.curvature import Curvature
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.header import Fields, count
from nullbayes.posteriors.scoring import COMBINED, VARIANCE, Scoring
from nullbayes.precision import full_precision
from nullbayes.predictive import SCORES, Mask, Prediction, joined, scores_of


class Baseline(SamplePosterior):
    """A method to compare with; abstract: a subclass sets ``_method``, which says how it approximates.

    Parameters
    ----------
    model : nn.Module
        The trained network; it is never changed.
    likelihood : str, Likelihood or callable
        "classification", "binary", "multilabel", "regression", or a per-example loss.
    parameters : None, str, iterable of str, or callable
        Which parameters vary: names, globs, or a predicate (name, parameter).
    prior_precision : float
        The precision of the Gaussian prior. It is 1 until another is passed, set or chosen, whatever the data: the
        probabilities can then be far worse than the network's, because samples vary too much. After the fit, choose one
        by held-out data, :meth:`optimize_prior_precision`, and compare with the network, :meth:`check_fit`.
    batch_fn : callable, optional
        Turns a batch of the loader into ``(inputs, targets)``.
    output_fn : callable, optional
        Takes the outputs out of what the model returns; by default its only tensor, or that called "logits".

    Examples
    --------
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 3), torch.eye(4), torch.tensor([0, 1, 2, 0])
    >>> for kind in (nb.baselines.DiagonalLaplace, nb.baselines.LanczosLaplace):
    ...     kind(model, prior_precision=10.0).fit(x, y).ood_score(x).shape
    torch.Size([4])
    torch.Size([4])
    """

    _header_fields: ClassVar[Fields] = {"seed": count, "settings": lambda value: isinstance(value, dict)}
    _report_fields: ClassVar[Fields] = REPORT_FIELDS

    @property
    @abstractmethod
    def _method(self) -> Method[Any]:
        """How the baseline approximates; a class attribute of each subclass."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        parameters: Selection = None,
        prior_precision: float = DEFAULT_PRECISION,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
    ) -> None:
        super().__init__(
            model,
            likelihood,
            parameters=parameters,
            prior_precision=check_prior(type(self).__name__, prior_precision, has_prior=self._method.has_prior),
            batch_fn=batch_fn,
            output_fn=output_fn,
        )
        self._pred_type, self._fewest = self._method.pred_type, self._method.fewest
        self._parameters_chosen = parameters is not None
        self._fitted: Fitted | None = None

    # --- fitting ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        generator: torch.Generator | None = None,
        memory_limit: int | str | None = None,
        progress: bool = True,
    ) -> Self:
        """Learn from the training data.

        Parameters
        ----------
        loader : iterable of batches, or all inputs
            The training data, unshuffled and without augmentation: ``fit(loader)``; see ``nb.evaluation_loader``. Or
            the inputs, as a tensor or an array: ``fit(x, y)``.
        targets : Tensor or array, optional
            The targets of those inputs.
        n_samples : int
            The number of samples for predictions; ``fit(loader, 50)`` or ``fit(x, y, 50)``.
        generator : torch.Generator, optional
            The same seed gives the same samples, on any device.
        memory_limit : int or str, optional
            Bytes, or a string such as "8GB", to be used beside the model and the data; default 60 % of what is free,
            85 % on a GPU.
        progress : bool
            Show a progress bar, on a terminal.

        Returns
        -------
        Baseline
            The posterior itself. A fit that fails leaves it without samples.
        """
        options: FitOptions = {"generator": generator, "memory_limit": memory_limit, "progress": progress}
        return self._fit(self._method.fit, loader, targets, n_samples, **options)

    def _fit(self, learn: Learn, loader: Any, targets: Any, n_samples: int, **options: Unpack[FitOptions]) -> Self:
        self._network.check_unchanged()
        self._likelihood, self._directions, self._fitted = self._asked, None, None  # a fit that fails leaves nothing
        self._familiar = self._calibration = None
        data, choose = (loader, targets, n_samples), not self._parameters_chosen
        fitted, rows, directions = run_fit(self, self._method, learn, data, choose_parameters=choose, **options)
        self._network, self._likelihood = rows.network, rows.likelihood
        self._directions, self._fitted = directions, fitted
        self._remember(rows)
        return self

    def _need_fit(self) -> Fitted:
        if self._fitted is None:
            msg = f"{type(self).__name__} has not learned anything yet: call fit(loader) first."
            raise NotFittedError(msg)
        return self._fitted

    @property
    def report(self) -> BaselineReport:
        """What the fit measured."""
        return BaselineReport(
            method=type(self).__name__,
            n_parameters=self._network.n_parameters,
            n_samples=self.n_samples,
            prior_precision=self.prior_precision if self._method.has_prior else None,
            **self._need_fit().measured,
        )

    @property
    def curvature(self) -> Curvature:
        """The curvature in the form of the method; its ``log_determinant`` and ``variance`` take the precision."""
        state = self._state()
        if not isinstance(state, Curvature):
            msg = f"{type(self).__name__} has no curvature."
            raise SettingsError(msg)
        return state

    def _state(self) -> Any:
        """Return what the method has learned, for a method that can draw new samples from it."""
        state = self._need_fit().state
        if state is None and self._method.has_prior:
            msg = (
                "No file or copy holds this curvature, which was too large or had rows of its own: it predicts at the "
                f"prior precision {self.prior_precision:g} that it was made with. Fit a new one for another."
            )
            raise NotFittedError(msg)
        return state

    @property
    def _scoring(self) -> Scoring:
        """Which scores there are.

        The combined score is calibrated by default for methods with samples that vary, their own for the others. It
        weighs the variance of the samples, or the score of a method that has none.
        """
        method, default = self._method, self._method.default_score(self._likelihood)
        name = method.own_score
        own = {} if name is None or name in method.of_predictions else {name: self._own_scores}
        membership = VARIANCE if VARIANCE in method.scores else None if method.fewest else name
        applies = default in own or default in scores_of(self._likelihood)
        calibrated = default if method.scores is not SCORES and applies else COMBINED
        return Scoring(default, method.scores, own, membership, calibrated)

    # --- predictions --------------------------------------------------------------------------------------------------

    def _question(self, x: Any, directions: Tensor | None = None, alpha: float | None = None, **asked: Any) -> Question:
        """Return a question about inputs; about all samples at the precision in use, unless others are given."""
        directions = self.directions if directions is None else directions
        asked["pred_type"] = asked.get("pred_type") or self._method.pred_type
        own = self._network, self._likelihood, self._batch_fn
        return Question(x, *own, directions, alpha or self.prior_precision, **asked)

    def _need_samples(self) -> None:
        """Refuse predictions of a method that is only a score."""
        self._need_fit()
        if self.n_samples == 0:
            msg = (
                f"{type(self).__name__} is a score and makes no predictions: for samples in the same space use "
                "nb.ProjectedPosterior with projector=nb.projectors.Lanczos(rank=...)."
            )
            raise SettingsError(msg)

    @full_precision()
    def _predict(
        self, x: Any, *, pred_type: Any = None, n_samples: Any = None, link_approx: Any = None, mask: Mask = None
    ) -> Prediction:
        """Predict, with a dimension for the outputs also where the model returns one number per input."""
        self._network.check_unchanged()
        self._need_samples()
        question = self._question(x, self._first(n_samples), pred_type=pred_type, link=link_approx, mask=mask)
        return self._method.predict(self._need_fit().state, question)

    @full_precision()
    def _own_scores(self, x: Any, per: str, mask: Mask) -> Tensor:  # (N,)
        method, state = self._method, self._state()
        if per != "input" or not (mask is None or (isinstance(mask, str) and mask == "all")):
            msg = f'The score "{method.own_score}" is of whole inputs: it takes no mask, and per="input" only.'
            raise SettingsError(msg)
        self._network.check_unchanged()
        return method.score_inputs(state, self._question(x))

    @full_precision()
    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, ...)
        r"""Return the variance of the linearized outputs.

        Parameters
        ----------
        x : as for :meth:`predict`
            The inputs.
        exact : bool
            Return :math:`J(x) (C + \alpha I)^{-1} J(x)^\top` itself, without Monte Carlo error. Only Laplace
            approximations can.

        Returns
        -------
        Tensor (N, ...)
            One variance per output.
        """
        if not (exact and self._method.is_laplace):
            return SamplePosterior.functional_variance(self, x, exact=exact)
        curvature, alpha = self.curvature, self.prior_precision
        self._network.check_unchanged()
        parts = [
            curvature.variance(rows.flatten(0, 1), alpha).view(-1, *self._network.output_shape(part.x))
            for part, rows in rows_at(self._question(x))
        ]
        return self._network.as_returned(torch.cat(parts))

    def _sampled_tensors(self, i: int) -> dict[str, Tensor]:
        flat = self._network.theta + self.directions[i] / self.prior_precision**0.5
        return self._method.sampled(self._need_fit().state, self._network, i, flat)

    def _evaluate(self, loader: Iterable[Any], purpose: str = "") -> tuple[Tensor, Tensor, Tensor]:
        self._need_samples()
        outputs, changes, targets = [], [], []
        for x, y in self._pieces(loader, purpose=purpose):
            own = self._network.outputs(x)
            self._likelihood.check(own, y)
            change = self._predict(x).samples - own
            outputs.append(own)
            changes.append(change.expand(max(2, len(change)), *own.shape))  # the least that has a variance
            targets.append(y)
        return joined(outputs), torch.cat(changes, dim=1) * math.sqrt(self.prior_precision), torch.cat(targets)

    # --- prior precision ----------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> float:
        r"""The prior precision :math:`\alpha` in use, a positive number. Setting it draws the samples anew."""
        return float(self._precision_rule)

    @prior_precision.setter
    def prior_precision(self, value: str | float) -> None:
        alpha = check_prior(type(self).__name__, value, has_prior=self._method.has_prior)
        if self._fitted is not None and alpha != self.prior_precision:
            self._directions = self._drawn(alpha)
        self._precision_rule = alpha

    def _drawn(self, alpha: float) -> Tensor:  # (S, P)
        """Return the directions of the same samples at another precision."""
        return draw(self._method, self._state(), self._network, self._need_fit().seed, self.n_samples, alpha)

    @full_precision()
    def optimize_prior_precision(
        self, loader: Any = None, method: str = "nll", *, pred_type: str = "linearized"
    ) -> float:
        """Choose the prior precision, set it and return it.

        Parameters
        ----------
        loader : iterable of batches or pair (inputs, targets), optional
            Held-out data for "nll" and "grid"; "marglik" needs none.
        method : "nll", "grid" or "marglik"
            The best log-likelihood of the mean prediction, among all numbers or among the paper's 0.1, 1, 5, 10, 50 and
            100; or the best marginal likelihood, with the curvature as it was approximated.
        pred_type : "linearized" or "sampled"
            The kind of predictions for "nll" and "grid".

        Returns
        -------
        float
            The precision, which is now in use. If the search fails, the old one stays.
        """
        state = self._need_fit().state

        def predictor(alpha: float) -> Callable[[Any], Prediction]:
            directions = self._drawn(alpha)
            return lambda x: self._method.predict(state, self._question(x, directions, alpha, pred_type=pred_type))

        how = check_how(type(self).__name__, self._method, loader, method)
        if how == "marglik":
            best = best_evidence(*self.curvature.spectrum(), float(self._network.theta.double().square().sum()))
        else:
            pieces = self._pieces(loader, purpose=CONFIDENT)
            best = best_by_likelihood(how, pieces, self._likelihood, predictor, pred_type)
        self.prior_precision = best
        return best

    def tune(self, loader: Any, targets: Any = None) -> Never:
        """Refuse: samples of a baseline do not scale with its precision."""
        how = "optimize_prior_precision(loader) chooses its precision, and " if self._method.has_prior else ""
        msg = f"{type(self).__name__} has no tune: {how}posterior.temperature may be set."
        raise SettingsError(msg)

    # --- files and copies ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the method cannot take along, as a file does."""
        fitted = self._fitted
        if fitted is not None and fitted.state is not None:
            fitted = dataclasses.replace(fitted, state=self._method.copied(fitted.state))
        return {**vars(self), "_fitted": fitted}

    def _header(self) -> dict[str, Any]:
        fitted = self._need_fit()
        return {"report": dict(fitted.measured), "seed": fitted.seed, "settings": dataclasses.asdict(self._method)}

    def _tensors(self) -> dict[str, Tensor]:
        state = self._need_fit().state
        return {} if state is None else self._method.tensors(state)

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        network, seed = self._network, header["seed"]
        try:
            method = dataclasses.replace(self._method, **header["settings"])
            if dataclasses.asdict(method) != header["settings"]:
                msg = f"other settings, {header['settings']}"
                raise ValueError(msg)
            here = {name: tensor.to(network.device) for name, tensor in tensors.items()}
            state = method.restored(here, network, seed)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            msg = (
                f"The file's tensors are not those of a {type(self).__name__} of this model: it was altered, "
                f"fit and save again ({type(error).__name__}: {error})."
            )
            raise FileError(msg) from error
        self._method = method  # type: ignore[misc]  # subclasses have an attribute, no property
        self._fitted = Fitted(state, seed, dict(header["report"]))
