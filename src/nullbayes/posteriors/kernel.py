r"""The machine behind both projected posteriors: noise, projected onto the kernel of a set of rows.

Draw :math:`\varepsilon \sim N(0, I)` (or from a base distribution), project :math:`v = (I - A^+A)\,\varepsilon`.
Which rows :math:`A` has is the only difference between the two.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nullbayes.errors import DataError, FileError, NotFittedError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors import noise
from nullbayes.posteriors.arguments import data_and_count
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.posteriors.exact import ExactVariances
from nullbayes.posteriors.header import MOST_NOTES
from nullbayes.posteriors.numbers import whole
from nullbayes.posteriors.progress import Progress
from nullbayes.posteriors.promise import Promise, inspected
from nullbayes.posteriors.report import FitReport, added, check_same_data, dimension, warn_of
from nullbayes.posteriors.resources import Meter
from nullbayes.posteriors.setup import Asked, Setup, set_up, within_memory
from nullbayes.posteriors.sigma import with_noise
from nullbayes.posteriors.spread import loss_std, train_std
from nullbayes.posteriors.trial import run_trial
from nullbayes.precision import full_precision
from nullbayes.predictive import stream
from nullbayes.projectors import Outcome, Projector

_ON_TRAINING_DATA = ("_rows", "_state", "_exact", "_projector", "_jacobian", "_built")  # and only as long as needed


class KernelPosterior(SamplePosterior):
    """Samples in the kernel of rows; abstract: a subclass says which rows."""

    _rows: Rows | None = None
    _projector: Projector | None = None
    _state: Any = None
    _built: tuple[Asked, Setup]
    _exact: ExactVariances | None = None
    _base: noise.Base | None = None
    _report: dict[str, Any] | None = None
    _tolerance: float  # of a fit that is not told another
    _underfit_advice = 'The posterior underfits: use prior_precision="auto", a larger one, or a smaller tolerance.'

    @abstractmethod
    def _open_rows(self, examples: Examples) -> JacobianRows:
        """Return the rows on the training data."""

    # --- fitting ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        held_out: Iterable[Any] | None = None,
        projector: str | Projector = "auto",
        tolerance: float | None = None,
        base: noise.Base | None = None,
        generator: torch.Generator | None = None,
        memory_limit: int | str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> Self:
        """Draw samples whose predictions on the training data are those of the network.

        Parameters
        ----------
        loader : iterable of batches, or all inputs
            The training data, unshuffled and without augmentation: ``fit(loader)``; of a loader that was made for
            training, :func:`nb.evaluation_loader <nullbayes.evaluation_loader>` makes one. Or the inputs, as a tensor
            or an array: ``fit(x, y)``.
        targets : Tensor or array, optional
            The targets of those inputs. A number in their place is ``n_samples``: ``fit(loader, 50)``.
        n_samples : int
            How many.
        held_out : iterable of batches or pair (inputs, targets), optional
            Data that the network was not trained on, to choose precision and temperature by; see :meth:`tune`.
        projector : "auto" or Projector
            How to project; "auto" chooses by rows, parameters and memory, and says why in the report.
        tolerance : float, optional
            The share of the noise's effect on training outputs (0.01) or losses (0.02) that may remain, for "auto".
        base : Tensor (S, P), mapping of named tensors (S, ...), or callable (n, generator) -> either
            Noise to project instead of N(0, I): samples of another posterior around the same parameters, as deviations
            from them. It carries its own scale, so "optimal" then means a precision of 1.
        generator : torch.Generator, optional
            The same seed gives the same samples, on any device.
        memory_limit : int or str, optional
            Bytes, or a string such as "8GB", to be used beside the model and the data; default 60 % of what is free,
            85 % on a GPU. ``nb.plan`` tells beforehand what will be. Where memory runs out all the same, the fit plans
            again with half of it, or halves the blocks of the projector, and notes it in the report.
        checkpoint : path, optional
            A file in which an iterative projector keeps what it has reached, every few seconds. A fit that was killed,
            or interrupted with Ctrl-C, is called again as before with the same path: it goes on at the stored sweep,
            with the seed of the file, to the same samples, bit by bit, on the same machine. A file that cannot be
            written stops the fit at its start and is a warning later. It is removed when the fit has finished.
        progress : bool
            Show a bar, on a terminal.
        """
        data, n_samples = data_and_count(loader, targets, n_samples)
        if n_samples < 2:
            msg = f"n_samples must be at least 2 to speak of a variance, not {n_samples}."
            raise SettingsError(msg)
        self._base, self._likelihood = base, self._asked
        self._forget()  # what an earlier fit holds is memory for this one
        self._precision = self._report = None
        self._precision_rule = self._asked_precision
        tolerance = self._tolerance if tolerance is None else tolerance
        with Progress(show=progress) as bar, Checkpoint(checkpoint) as store:
            asked = Asked(self._open(data, bar), n_samples, projector, tolerance, memory_limit)
            based = None if base is None else lambda seed: noise.based(self._network, base, seed, 0, n_samples)
            seed, setup = store.begin(asked, None if generator is None else noise.draw_seed(generator), based)
            promise = None
            if self._precision_rule == "auto" and held_out is None:
                with self._meter.phase("trial"):
                    promise = run_trial(asked, base, seed)

            def work(setup: Setup) -> None:
                store.follow(setup)
                self._report = {**self._build(asked, setup), "seed": seed, "promise": promise}
                self._draw(n_samples, bar, store)

            within_memory(asked, setup, work, self._forget)
        if held_out is not None:
            self.tune(held_out)
        warn_of(self.report, self._underfit_advice)
        return self

    def extend(self, n_samples: int, *, progress: bool = True) -> Self:
        """Draw more samples and keep the earlier ones: ``fit(10)`` and ``extend(20)`` are ``fit(30)``.

        Where memory runs out, fewer are drawn at a time; where one is too many, by a smaller plan, as in ``fit``. The
        report's notes say so. Where nothing helps, the samples so far stay.
        """
        if (n_samples := whole(n_samples)) < 1:
            msg = f"n_samples must be at least 1, not {n_samples}."
            raise SettingsError(msg)
        self._need_state()
        wanted, (asked, setup) = self.n_samples + n_samples, self._built
        with Progress(show=progress) as bar:

            def work(now: Setup) -> None:
                if self._state is None or str(now) != str(self._built[1]):
                    self._rebuild(asked, now)
                fewer = f"memory ran out; extend drew the samples {now.at_once} at a time"
                notes = [*now.notes[len(setup.notes) :], *([fewer] if now.at_once < n_samples else [])]
                going = True
                while going and self.n_samples < wanted:
                    going = self._draw(min(now.at_once, wanted - self.n_samples), bar)
                    assert self._report is not None
                    self._report["notes"] = tuple(dict.fromkeys([*self._report["notes"], *notes]))[-MOST_NOTES:]

            try:
                single, first = dataclasses.replace(asked, n_samples=1), dataclasses.replace(setup, at_once=n_samples)
                within_memory(single, first, work, lambda: self._state is None and self.release())  # what is half built
            except SettingsError as error:
                if error.__cause__ is None:
                    raise
                again = "" if self._state is not None else " Call prepare(loader) before you extend it again."
                msg = f"{error} The posterior keeps the {self.n_samples} samples that it has.{again}"
                raise SettingsError(msg) from error.__cause__
        return self

    def prepare(
        self,
        loader: Any,
        targets: Any = None,
        *,
        projector: str | Projector = "auto",
        tolerance: float | None = None,
        memory_limit: int | str | None = None,
    ) -> Self:
        """Build rows and projector anew, for a posterior that was loaded or released.

        ``extend`` and exact variances need them. The tolerance for "auto" is that of the fit, unless told otherwise.
        """
        _ = self.directions  # says what to do before fit
        assert self._report is not None
        tolerance = self._report["tolerance"] if tolerance is None else tolerance
        with Progress(show=False) as bar:
            data = loader if targets is None else (loader, targets)
            asked = Asked(self._open(data, bar), self.n_samples, projector, tolerance, memory_limit)
            self.release()
            new: dict[str, Any] = {}
            within_memory(asked, set_up(asked), lambda setup: new.update(self._build(asked, setup)), self.release)
        try:
            check_same_data(new, self._report)
        except DataError:
            self.release()
            raise
        return self

    def release(self) -> Self:
        """Free training data, rows and projector; predictions stay, ``extend`` and exact variances need ``prepare``."""
        for name in _ON_TRAINING_DATA:
            vars(self).pop(name, None)
        return self

    def _forget(self) -> None:
        self.release()
        self._directions = None

    @full_precision()
    def _open(self, loader: Iterable[Any], bar: Progress) -> JacobianRows:
        """Read the data."""
        self._network.check_unchanged()
        self._meter = meter = Meter(self._network.device, bar.phase)
        with meter.phase("data"):
            examples = Examples(loader, self._batch_fn, self._network.device, dtype=self._network.dtype)
            rows = self._open_rows(examples)
            fitted = with_noise(self._likelihood, rows)
            if fitted is not rows.likelihood:
                self._likelihood = fitted
                rows = self._open_rows(examples)
        self._likelihood = rows.likelihood
        return rows

    @full_precision()
    def _build(self, asked: Asked, setup: Setup) -> dict[str, Any]:
        """Build rows and projector; return the report of a fit without samples."""
        rows, method = copy.copy(asked.rows), setup.projector  # a copy: another plan starts from what was asked
        rows.working_bytes, self._projector, self._jacobian = setup.working_bytes, method, rows
        with self._meter.phase("rows"):
            self._rows = rows.stored(setup.storage)
        with self._meter.phase("factors"):
            self._state = method.prepare(self._rows)
        self._built, self._exact = (asked, setup), None
        return {
            "projector": type(method).__name__, "reason": setup.reason, "route": rows.route,
            "n_data": len(rows.examples), "n_rows": rows.n_rows, "n_counted": rows.n_counted,
            "tolerance": method.rtol, "sweeps": 0, "residual": (),
            "converged": True, "traces": (), "rank": None, "output_std": rows.output_std,
            "notes": setup.notes, "data": rows.examples.fingerprint(),
        }  # fmt: skip

    def _rebuild(self, asked: Asked, setup: Setup) -> None:
        """Build rows and projector by another plan; the samples stay."""
        assert self._report is not None
        self.release()
        new = self._build(asked, setup)
        self._report = {**self._report, **{name: new[name] for name in ("projector", "reason", "route")}}

    @full_precision()
    def _draw(self, n_samples: int, bar: Progress, store: Checkpoint | None = None) -> bool:
        """Draw all of the samples or, where something fails, none; return whether nobody interrupted it."""
        assert self._report is not None
        assert self._projector is not None
        assert self._rows is not None
        report, have = dict(self._report), 0 if self._directions is None else len(self._directions)
        if self._base is None:
            drawn = noise.normal(self._network, report["seed"], have, n_samples)
        else:
            drawn = noise.based(self._network, self._base, report["seed"], have, n_samples)
        self._meter.announce = bar.phase
        with self._meter.phase("projection"):
            callback = bar.sweeps(report["tolerance"])
            projection = self._projector.apply(self._state, drawn, callback=callback, store=store)
        info, new = projection.info, projection.directions[:n_samples]
        measured = slice(0, n_samples) if self._base is None else slice(n_samples, None)
        estimates = info.traces[measured]
        with self._meter.phase("measure"):
            left = *train_std(self._jacobian, self._rows, new), loss_std(self._jacobian, self._rows, new)
        directions = new if self._directions is None else torch.cat([self._directions, new])
        report |= added(report, info, estimates, left, self._projector.rtol, n_samples)
        report["seconds"], report["peak_memory"] = dict(self._meter.seconds), self._meter.peak()
        # at the end: whoever is interrupted has all or nothing
        self._directions, self._report, self._exact = directions, report, None
        self._kernel_dimension = dimension(report, self._network.n_parameters)[0]
        if isinstance(self._precision_rule, str):
            self._precision = None  # the estimate of the rank has changed
        if report["promise"] is not None:
            with self._meter.phase("measure"):
                closed = self._resolve_precision("optimal")
                report["promise"] = inspected(report["promise"], self._jacobian, directions, closed, report["seed"])
            report["seconds"] = dict(self._meter.seconds)
        return info.outcome is not Outcome.INTERRUPTED

    def _resolve_precision(self, rule: str | float) -> float:
        if rule == "auto":
            promise: Promise | None = None if self._report is None else self._report["promise"]
            if promise is None:
                msg = (
                    'prior_precision="auto" is measured during a fit that has it from the start: fit again, or tune().'
                )
                raise SettingsError(msg)
            return max(self._resolve_precision("optimal"), promise.needed)
        if isinstance(rule, str) and self._base is not None:
            return 1.0
        return super()._resolve_precision(rule)

    # --- what came of it ----------------------------------------------------------------------------------------------

    @property
    def report(self) -> FitReport:
        """What the fit measured, at the prior precision in use."""
        if self._report is None or "train_std" not in self._report:
            msg = f"{type(self).__name__} has no report yet: call fit(loader) first."
            raise NotFittedError(msg)
        size = self._network.n_parameters
        in_use = self.prior_precision, self.temperature, self._precision_rule
        return FitReport.of(self._report, size, self.n_samples, *in_use)

    # --- more than samples --------------------------------------------------------------------------------------------

    @full_precision()
    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, ...)
        r"""Return the variance of the linearized outputs.

        Parameters
        ----------
        x : as for ``predict``
            The inputs.
        exact : bool
            Project the rows of :math:`J(x)` themselves, :math:`\|(I - A^+A) J_o(x)^\top\|^2/\alpha`: no Monte Carlo
            error, at the price of one projection per output, by the steps that the samples took.
        """
        if not exact:
            return self.predict(x).variance
        self._need_state()
        if self._base is not None:
            msg = "The exact variance is known for the base distribution N(0, I) only: use exact=False."
            raise SettingsError(msg)
        assert self._projector is not None
        assert self._report is not None
        exact_at = self._exact
        if exact_at is None:
            self._exact = exact_at = ExactVariances(
                self._network, self._projector, self._state, self._report, working_bytes=self._jacobian.working_bytes
            )
        parts = [exact_at(piece) for piece in stream(x, self._network, self._batch_fn, n_samples=256)]
        return torch.cat(parts) / self.prior_precision

    def _need_state(self) -> None:
        _ = self.directions  # says what to do before fit
        self._network.check_unchanged()
        if self._state is None:
            msg = "This needs the training rows, which no file or copy holds: call prepare(loader) first."
            raise NotFittedError(msg)

    # --- files and copies ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the training data and all that was built on them, as a file does."""
        state = {name: value for name, value in vars(self).items() if name not in (*_ON_TRAINING_DATA, "_meter")}
        return state if self._base is None else {**state, "_base": noise.lost}

    def _header(self) -> dict[str, Any]:
        if self._report is None:
            return {}
        promise = self._report["promise"]
        stored = {**self._report, "promise": None if promise is None else dataclasses.asdict(promise)}
        return {"report": stored, "based": self._base is not None}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        report = dict(header["report"])
        for name in ("residual", "traces"):
            report[name] = tuple(float(v) for v in report[name])
        report["promise"] = None if report["promise"] is None else Promise(**report["promise"])
        self._report = report
        self._base = noise.lost if header["based"] else None
        if self.report.n_samples != len(report["residual"]):
            msg = "The file's report does not fit its samples: it was altered."
            raise FileError(msg)
