"""What every baseline shares: one way to fit, a prior precision that is a number, a report, a file."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

from nullbayes import priors
from nullbayes.baselines.report import BaselineReport
from nullbayes.errors import FileError, LikelihoodError, NotFittedError, NullBayesWarning, SettingsError
from nullbayes.jacobian.batches import BatchFn, n_examples, take_examples
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.jacobian.products import output_rows
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors import noise
from nullbayes.posteriors.arguments import data_and_count
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.numbers import positive
from nullbayes.posteriors.progress import Progress
from nullbayes.posteriors.resources import Meter, memory_limit_bytes
from nullbayes.posteriors.scale import best_of_grid, check_method
from nullbayes.precision import full_precision
from nullbayes.predictive import default_link, nll, stream

_ROW_BYTES = {"cpu": 2**26, "cuda": 2**30}  # of new inputs, at a time


@dataclass(frozen=True)
class Work:
    """What a method is given to fit from."""

    rows: OutputJacobian
    n_samples: int
    available: int  # bytes
    meter: Meter

    @property
    def examples(self) -> Examples:
        """The training data."""
        return self.rows.examples

    def held(self, allowed: int) -> Rows:
        """Return the rows, held in memory if they take no more than so many bytes: for methods that read them often."""
        return self.rows.stored("device") if self.rows.costs().held_bytes <= allowed else self.rows


class Baseline(SamplePosterior):
    """A method to compare with; abstract: a subclass says what it learns from the data.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    prior_precision : float
        The precision of the Gaussian prior; see ``optimize_prior_precision``.
    """

    _hessian = True  # whether the rows are scaled by the likelihood's Hessian
    _has_prior = True
    _least_samples = 2
    _report: dict[str, Any] | None = None
    _seed = 0

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        prior_precision: float = 1.0,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
    ) -> None:
        self._check_prior(prior_precision)
        super().__init__(
            model, likelihood, parameters=parameters, prior_precision=prior_precision, batch_fn=batch_fn,
            output_fn=output_fn,
        )  # fmt: skip

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
            The training data, unshuffled and without augmentation: ``fit(loader)``; of a loader that was made for
            training, :func:`nb.evaluation_loader <nullbayes.evaluation_loader>` makes one. Or the inputs, as a tensor
            or an array: ``fit(x, y)``.
        targets : Tensor or array, optional
            The targets of those inputs. A number in their place is ``n_samples``: ``fit(loader, 50)``.
        n_samples : int
            How many samples predictions are made of.
        generator : torch.Generator, optional
            The same seed gives the same samples, on any device.
        memory_limit : int or str, optional
            Bytes, or a string such as "8GB", to be used beside the model and the data; default 60 % of what is free,
            85 % on a GPU.
        progress : bool
            Show a bar, on a terminal.
        """
        return self._fit(
            *data_and_count(loader, targets, n_samples), generator, memory_limit, self._learn, progress=progress
        )

    def _fit(
        self,
        loader: Iterable[Any],
        n_samples: int,
        generator: torch.Generator | None,
        memory_limit: int | str | None,
        learn: Callable[[Work], tuple[int | None, str]],
        *,
        progress: bool,
    ) -> Self:
        if n_samples < self._least_samples:
            msg = f"n_samples must be at least {self._least_samples} for {type(self).__name__}, not {n_samples}."
            raise SettingsError(msg)
        self._network.check_unchanged()
        self._forget()
        device = self._network.device
        available = memory_limit_bytes(memory_limit, device)
        with Progress(show=progress) as bar:
            meter = Meter(device, bar.phase)
            with meter.phase("data"), full_precision():
                rows = self._open_rows(Examples(loader, self._batch_fn, device, dtype=self._network.dtype))
            rows.working_bytes = min(rows.working_bytes, available // 8)
            self._likelihood, self._seed = rows.likelihood, noise.draw_seed(generator)
            try:
                rank, reason = learn(Work(rows, n_samples, available, meter))
            except BaseException:
                self._forget()  # half a fit is none
                raise
        self._report = {
            "reason": reason, "n_data": len(rows.examples), "rank": rank,
            "seconds": dict(meter.seconds), "peak_memory": meter.peak(),
        }  # fmt: skip
        return self

    @abstractmethod
    def _learn(self, work: Work) -> tuple[int | None, str]:
        """Learn what the method needs; return its rank and, in a few words, its form."""

    def _forget(self) -> None:
        """Drop what an earlier fit has left."""
        self._likelihood = self._asked
        self._directions, self._report = None, None

    def _open_rows(self, examples: Examples) -> OutputJacobian:
        if self._hessian and self._likelihood.name == "custom":
            msg = (
                f"{type(self).__name__} needs the Hessian of the loss in the outputs, which is not known for a loss of "
                "your own: use a likelihood by name, or nb.LossProjectedPosterior, which needs gradients only."
            )
            raise LikelihoodError(msg)
        return OutputJacobian(self._network, examples, self._likelihood, hessian=self._hessian)

    @property
    def report(self) -> BaselineReport:
        """What the fit took."""
        if self._report is None:
            msg = f"{type(self).__name__} has no report yet: call fit(loader) first."
            raise NotFittedError(msg)
        return BaselineReport(
            method=type(self).__name__, n_parameters=self._network.n_parameters, n_samples=self.n_samples,
            prior_precision=self.prior_precision if self._has_prior else None, **self._report,
        )  # fmt: skip

    def _row_pieces(self, x: Any) -> Iterator[tuple[Any, Tensor]]:  # rows (n, O, P)
        """Iterate over inputs with the rows of their outputs, few enough at a time to be held."""
        self._network.check_unchanged()
        most = _ROW_BYTES.get(self._network.device.type, 2**26)
        for piece in stream(x, self._network, self._batch_fn, 1):
            width = math.prod(self._network.output_shape(piece))
            step = max(1, most // (width * self._network.n_parameters * self._network.dtype.itemsize))
            for start in range(0, n_examples(piece), step):
                part = take_examples(piece, start, start + step)
                yield part, output_rows(self._network, part).flatten(1, -2)

    # --- prior precision ----------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> float:
        r"""The prior precision :math:`\alpha` in use; a number, which may be set."""
        return float(self._precision_rule)

    @prior_precision.setter
    def prior_precision(self, value: str | float) -> None:
        self._precision_rule = self._check_prior(value)

    def _check_prior(self, value: str | float) -> float:
        number = None if isinstance(value, str) else positive(value)
        if number is None:
            msg = (
                f"prior_precision of {type(self).__name__} must be a positive number, not {value!r}: "
                "optimize_prior_precision(loader) chooses one after the fit."
            )
            raise SettingsError(msg)
        if not self._has_prior and number != 1.0:
            msg = f"{type(self).__name__} has no prior: leave prior_precision out."
            raise SettingsError(msg)
        return number

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
            100; or the best marginal likelihood, of the curvature as it was approximated.
        pred_type : "linearized" or "sampled"
            The predictions to judge by.
        """
        _ = self.directions  # says what to do before fit
        if not self._has_prior:
            msg = f"{type(self).__name__} has no prior, so there is no precision to choose."
            raise SettingsError(msg)
        before = self.prior_precision
        try:
            best = self._chosen(check_method(loader, method), loader, pred_type)
        except BaseException:
            self.prior_precision = before
            raise
        self.prior_precision = best
        return best

    def _chosen(self, method: str, loader: Any, pred_type: str) -> float:
        if method == "closed_form":
            msg = f'{type(self).__name__} has no closed form of the best precision: use "nll", "grid" or "marglik".'
            raise SettingsError(msg)
        if method == "marglik":
            return self._maximize_evidence()
        objective = self._held_out(loader, pred_type)
        if method == "grid":
            return best_of_grid(objective)
        return priors.maximize(objective, 1.0, "held-out likelihood")  # not from where an earlier one ended

    def tune(self, loader: Any, targets: Any = None) -> Never:
        """Refuse: samples of a baseline do not scale with its precision."""
        how = "optimize_prior_precision(loader) chooses its precision, and " if self._has_prior else ""
        msg = f"{type(self).__name__} has no tune: {how}posterior.temperature may be set."
        raise SettingsError(msg)

    def _held_out(self, loader: Iterable[Any], pred_type: str) -> Callable[[float], float]:
        """Return the log-likelihood of the mean prediction as a function of the precision."""
        chunks = list(self._pieces(loader))
        link = self._link if self._link == "mc" else default_link(pred_type)

        def objective(alpha: float) -> float:
            self.prior_precision, total, n_targets = alpha, 0.0, 0
            for x, y in chunks:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Some predictions", NullBayesWarning)  # the search goes around it
                    found = self.predict(x, pred_type=pred_type)
                self._likelihood.check(found.mean, y)
                here = self._likelihood.n_targets(found.mean, y)
                total -= here * nll(self._likelihood, found.mean, found.samples - found.mean, y, link)
                n_targets += here
            return total / max(1, n_targets)

        return objective

    def _maximize_evidence(self) -> float:
        msg = f'{type(self).__name__} has no marginal likelihood: use method="grid" or "nll" with held-out data.'
        raise SettingsError(msg)

    # --- files --------------------------------------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        return {"report": self._report, "seed": self._seed}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        self._report, self._seed = dict(header["report"]), header["seed"]
        try:
            self._take_up({name: tensor.to(self._network.device) for name, tensor in tensors.items()})
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            msg = (
                f"The file's tensors are not those of a {type(self).__name__} of this model: it was altered, "
                f"fit and save again ({type(error).__name__}: {error})."
            )
            raise FileError(msg) from error

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the tensors that a method added to the file."""
