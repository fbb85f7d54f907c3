r"""Noise, projected onto the null space of rows :math:`A`, in which alone the projected posteriors differ."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from nullbayes.errors import FileError, NotFittedError
from nullbayes.posteriors import extending, fitting, variances
from nullbayes.posteriors.arguments import Base, data_and_count, lost
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.measured import REPORT, Measured, from_header
from nullbayes.posteriors.plan import Prepared, RowSource, sharing
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
    _prepared: Prepared | None = None  # None before a fit, and after release, load or a copy
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
        parallel: str | None = None,
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
            The share of the noise's effect on training outputs (0.01) or losses (0.02) that may remain, for "auto". A
            projector that is passed has its own, ``rtol``.
        base : Tensor (S, P), mapping of named tensors (S, ...), or callable (n, generator) -> either
            Noise to project instead of N(0, I): deviations from the parameters, with a scale of their own.
        generator : torch.Generator, optional
            The same seed gives the same samples, on any device.
        memory_limit : int or str, optional
            Bytes, or a string such as "8GB", to be used beside the model and the data; default 60 % of what is free,
            85 % on a GPU; ``nb.plan`` shows the plan beforehand. If memory runs out nevertheless, the fit continues
            with a plan for half of it, or with smaller blocks of the projector, and the report notes it. A limit that
            makes the fit far slower than a larger one causes a warning that names the larger one.
        checkpoint : path, optional
            A file in which an iterative projector stores its state every few seconds. A fit that was killed, or
            interrupted with Ctrl-C, is called again with the same arguments: it continues at the stored sweep to the
            same samples, bit by bit, on the same machine. The file is removed at the end of the fit.
        progress : bool
            Show a progress bar, on a terminal.
        parallel : "data", "samples", "parameters" or None
            What the processes that ``torchrun`` has started share, after ``nb.distributed.init()``. All of them call
            ``fit`` with the same arguments, and all get the same posterior. "data": each reads a part of the training
            data and holds the rows of that part; pass all data, or a loader that a DistributedSampler has divided.
            "samples": each reads all data and projects some of the samples, which are the same bits for any number of
            processes. "parameters": each reads all data, and has the directions of some parameters; then all processes
            also predict, score and save together. None: this process fits a posterior by itself, whatever others do.

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
        with sharing(parallel) as shared:
            source = fitting.own_source(self._source, shared, checkpoint)
            self._network = source.network
            self._prepared, fitted = fitting.fit(
                lambda: fitting.make_request(
                    source, data, shared, n_samples, projector, rtol, memory_limit, tuned=held_out is not None
                ),
                self._network.device,
                base,
                generator,
                checkpoint,
                show=progress and shared.group.rank == 0,
                trial=self._precision_rule == "auto" and held_out is None,
            )
            self._likelihood = self._prepared.jacobian.likelihood
            self._remember(self._prepared.jacobian)
            self._take(fitted)
            if held_out is not None:
                self.tune(held_out)
            warn_of(self.report, self._underfit_advice)
        return self

    @property
    def _source(self) -> RowSource:
        return RowSource(self._row_kind, self._network, self._asked, self._batch_fn, self._row_options)

    def _take(self, fitted: fitting.Samples) -> None:
        """Hold the samples of a fit, and what was measured on them."""
        self._directions, self._measured, self._exact = fitted.directions, fitted.measured, None
        if isinstance(self._precision_rule, str):
            self._precision = None  # a new estimate of the rank gives another

    extend = full_precision()(extending.extend)
    prepare = full_precision()(extending.prepare)

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
        measured, size = self._need_measured(), self._network.whole.n_parameters
        weights = {} if self._calibration is None else self._calibration.weights
        return FitReport.of(measured, size, self.prior_precision, self._likelihood, self._precision_rule, weights)

    functional_variance = variances.functional_variance

    def _resolve_precision(self, rule: str | float) -> float:
        return self._need_measured().precision(rule, self._network.whole.theta)

    def _need_measured(self) -> Measured:
        self._check_fitted()
        assert self._measured is not None  # a fit and a file have both
        return self._measured

    def _need_prepared(self) -> Prepared:
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
