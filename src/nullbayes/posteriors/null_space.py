r"""Noise, projected onto the null space of rows :math:`A`, in which alone the projected posteriors differ."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from nullbayes.errors import FileError, NotFittedError, SettingsError
from nullbayes.limits import OutOfMemory, attempt
from nullbayes.posteriors import fitting, variances
from nullbayes.posteriors.arguments import Base, Noise, data_and_count, lost, whole
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.measured import REPORT, Measured, from_header
from nullbayes.posteriors.plan import FitPlan, FitRequest, shrink
from nullbayes.posteriors.progress import Meter, Progress
from nullbayes.posteriors.report import FitReport, warn_of
from nullbayes.precision import full_precision
from nullbayes.projectors import Projector


class NullSpacePosterior(SamplePosterior):
    """Samples in the null space of rows; abstract: a subclass says which rows."""

    _report_fields = REPORT
    _scoring = property(variances.scoring)
    _row_options: Mapping[str, Any] = MappingProxyType({})  # which a file holds as well
    _tolerance: ClassVar[float]  # of a fit that is not given another
    _underfit_advice = 'The posterior underfits: use prior_precision="auto", a larger one, or a smaller tolerance.'
    _base: Base | None = None
    _measured: Measured | None = None
    _prepared: fitting.Prepared | None = None  # None before a fit, and after release, load or a copy
    _exact: variances.ExactVariances | None = None  # made when it is first needed

    @property
    @abstractmethod
    def _row_kind(self) -> Callable[..., Any]:
        """The class of the rows."""

    @full_precision()
    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        held_out: Iterable[Any] | None = None,
        projector: str | Projector = "auto",
        tolerance: float | None = None,
        base: Base | None = None,
        generator: torch.Generator | None = None,
        memory_limit: int | str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> Self:
        """Draw samples whose predictions on the training data are those of the network.

        Parameters
        ----------
        loader : iterable of batches, or all inputs
            The training data, unshuffled and without augmentation: ``fit(loader)``; see ``nb.evaluation_loader``. Or
            the inputs, as a tensor or an array: ``fit(x, y)``.
        targets, n_samples : Tensor or array, optional; int
            The targets of those inputs, and the number of samples: ``fit(x, y, 50)`` or ``fit(loader, 50)``.
        held_out : iterable of batches or pair (inputs, targets), optional
            Data that the network was not trained on, to choose precision and temperature by; see :meth:`tune`.
        projector : "auto" or Projector
            How to project; "auto" chooses by rows, parameters and memory, and gives the reason in the report.
        tolerance : float, optional
            The share of the noise's effect on training outputs (0.01) or losses (0.02) that may remain, for "auto".
        base : Tensor (S, P), mapping of named tensors (S, ...), or callable (n, generator) -> either
            Noise to project instead of N(0, I): deviations from the parameters, with a scale of their own.
        generator : torch.Generator, optional
            The same seed gives the same samples, on any device.
        memory_limit : int or str, optional
            Bytes, or a string such as "8GB", to be used beside the model and the data; default 60 % of what is free,
            85 % on a GPU; ``nb.plan`` shows the plan beforehand. If memory runs out nevertheless, the fit continues
            with a plan for half of it, or with smaller blocks of the projector, and the report notes it.
        checkpoint : path, optional
            A file in which an iterative projector stores its state every few seconds. A fit that was killed, or
            interrupted with Ctrl-C, is called again with the same arguments: it continues at the stored sweep to the
            same samples, bit by bit, on the same machine. The file is removed at the end of the fit.
        progress : bool
            Show a progress bar, on a terminal.

        Returns
        -------
        ProjectedPosterior
            The posterior itself; ``report`` says how it went. A fit that fails leaves it without samples.

        Examples
        --------
        >>> import torch
        >>> import nullbayes as nb
        >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
        >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
        >>> posterior.n_samples, posterior.report.kernel_dimension  # two of four directions are determined
        (10, 2.0)
        """
        data, n_samples = data_and_count(loader, targets, n_samples, least=2)
        self.release()  # the memory of an earlier fit is needed for this one
        self._directions = self._measured = self._precision = self._familiar = self._calibration = None
        self._base, self._likelihood, self._precision_rule = base, self._asked, self._asked_precision
        self._network.check_unchanged()
        rtol = self._tolerance if tolerance is None else tolerance
        with Progress(show=progress) as bar:
            self._prepared, fitted = fitting.fit(
                partial(fitting.open_rows, self._kind(), data, self._asked, tuned=held_out is not None),
                lambda rows: FitRequest(rows, n_samples, projector, rtol, memory_limit),
                base,
                generator,
                checkpoint,
                bar,
                Meter(self._network.device, bar.phase),
                trial=self._precision_rule == "auto" and held_out is None,
            )
        self._likelihood = self._prepared.jacobian.likelihood
        self._remember(self._prepared.jacobian)
        self._take(fitted)
        if held_out is not None:
            self.tune(held_out)
        warn_of(self.report, self._underfit_advice)
        return self

    def _kind(self) -> fitting.RowKind:
        return partial(self._row_kind, self._network, batch_fn=self._batch_fn, **self._row_options)

    def _take(self, fitted: fitting.Fitted) -> None:
        """Hold the samples of a fit, and what was measured on them."""
        self._directions, self._measured, self._exact = fitted.directions, fitted.measured, None
        self._kernel_dimension = fitted.measured.dimension(self._network.n_parameters)[0]
        if isinstance(self._precision_rule, str):
            self._precision = None  # a new estimate of the rank gives another

    @full_precision()
    def extend(self, n_samples: int, *, progress: bool = True) -> Self:
        """Draw more samples and keep the earlier ones: ``fit(10)`` and ``extend(20)`` are ``fit(30)``.

        Where memory runs out, fewer are drawn at a time, and then by a smaller plan; the report notes it.

        Parameters
        ----------
        n_samples : int
            How many samples to add.
        progress : bool
            Show a progress bar, on a terminal.

        Returns
        -------
        ProjectedPosterior
            The posterior itself. After ``load``, a copy or ``release`` it needs :meth:`prepare` first.

        Examples
        --------
        >>> import torch
        >>> import nullbayes as nb
        >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
        >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
        >>> posterior.extend(5).n_samples
        15
        """
        if (n_samples := whole(n_samples)) < 1:
            msg = f"n_samples must be at least 1, not {n_samples}."
            raise SettingsError(msg)
        request, plan = attrgetter("request", "plan")(self._need_prepared())
        wanted, at_once = self.n_samples + n_samples, n_samples
        with Progress(show=progress) as bar:
            while self.n_samples < wanted:
                note = f"memory ran out; extend drew the samples {at_once} at a time" if at_once < n_samples else ""
                n = min(at_once, wanted - self.n_samples)
                done = attempt(partial(self._draw_more, request, plan, n, bar, note))
                if isinstance(done, OutOfMemory) and at_once > 1:
                    at_once = (at_once + 1) // 2
                elif isinstance(done, OutOfMemory):
                    plan = self._smaller(request, plan, done.error)
                elif done.interrupted:
                    break
        return self

    def _draw_more(self, request: FitRequest, plan: FitPlan, n: int, bar: Progress, note: str) -> fitting.Fitted:
        """Draw ``n`` more samples by a plan, and hold them."""
        measured, meter = self._need_measured(), Meter(self._network.device, bar.phase)
        if self._prepared is None or self._prepared.plan.key != plan.key:
            self.release()  # before another is built
            self._prepared = fitting.build(request, plan, meter)
            route = self._prepared.jacobian.route
            measured = replace(measured, projector=type(plan.projector).__name__, reason=plan.reason, route=route)
        before, noise = fitting.Fitted(self.directions, measured), Noise(self._base, measured.seed)
        fitted = fitting.draw(self._prepared, noise, n, bar, meter, before=before, note=note)
        self._take(fitted)
        return fitted

    def _smaller(self, request: FitRequest, plan: FitPlan, error: BaseException) -> FitPlan:
        try:
            return shrink(replace(request, n_samples=1), plan, error)
        except SettingsError as refusal:
            again = "" if self._prepared is not None else " Call prepare(loader) before you extend it again."
            msg = f"{refusal} The posterior keeps the {self.n_samples} samples that it has.{again}"
            raise SettingsError(msg) from error

    prepare = full_precision()(fitting.prepare)

    def release(self) -> Self:
        """Free training data, rows and projector; predictions stay, ``extend`` and exact variances need ``prepare``.

        Returns
        -------
        ProjectedPosterior
            The posterior itself.

        Examples
        --------
        >>> import torch
        >>> import nullbayes as nb
        >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
        >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
        >>> posterior.release().n_samples
        10
        """
        self._prepared = self._exact = None
        return self

    @property
    def report(self) -> FitReport:
        """What the fit measured, at the prior precision in use."""
        measured, size = self._need_measured(), self._network.n_parameters
        weights = {} if self._calibration is None else self._calibration.weights
        return FitReport.of(measured, size, self.prior_precision, self._likelihood, self._precision_rule, weights)

    functional_variance = variances.functional_variance

    def _resolve_precision(self, rule: str | float) -> float:
        return self._need_measured().precision(rule, self._network.theta)

    def _need_measured(self) -> Measured:
        if self._measured is None:
            msg = f"{type(self).__name__} has no samples yet: call fit(loader) first."
            raise NotFittedError(msg)
        return self._measured

    def _need_prepared(self) -> fitting.Prepared:
        self._check_fitted()
        self._network.check_unchanged()
        if self._prepared is None:
            msg = "This needs the training rows, which no file or copy holds: call prepare(loader) first."
            raise NotFittedError(msg)
        return self._prepared

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the training data and all that was built on them, as a file does."""
        base = None if self._base is None else lost
        return {**vars(self), "_prepared": None, "_exact": None, "_base": base}

    def _header(self) -> dict[str, Any]:
        return {"report": self._need_measured().to_dict(), **self._row_options}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        self._measured = from_header(header["report"])
        self._base = lost if self._measured.based else None
        self._row_options = {name: header[name] for name in self._row_options}
        per_sample = self._measured.residual, self._measured.sweeps_per_sample
        if any(len(numbers) != self.n_samples for numbers in per_sample):
            msg = "The file's report does not fit its samples: it was altered."
            raise FileError(msg)
