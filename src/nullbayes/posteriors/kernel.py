r"""The machine behind both projected posteriors: noise, projected onto the kernel of a set of rows.

Draw :math:`\varepsilon \sim N(0, I)` (or from a base distribution), project :math:`v = (I - A^+A)\,\varepsilon`.
Which rows :math:`A` has is the only difference between the two.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nullbayes import priors
from nullbayes.errors import CollapseWarning, DataError, FileError, NotFittedError, SettingsError, UnderfitWarning
from nullbayes.jacobian.batches import n_examples, take_examples
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.products import output_rows
from nullbayes.jacobian.rows import JacobianRows, OutputJacobian
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors import noise
from nullbayes.posteriors.base import SamplePosterior
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.posteriors.measure import output_std, train_std
from nullbayes.posteriors.numbers import whole
from nullbayes.posteriors.progress import Progress
from nullbayes.posteriors.report import FitReport
from nullbayes.posteriors.resources import Meter
from nullbayes.posteriors.setup import Asked, Setup, set_up, within_memory
from nullbayes.precision import full_precision
from nullbayes.predictive import stream
from nullbayes.projectors import Iterative, Leader, Projector, mean_and_error, traces

_VECTORS = 10  # in memory for each one that is projected
_LEADERS = 30  # samples whose steps exact variances take


class KernelPosterior(SamplePosterior):
    """Samples in the kernel of rows; abstract: a subclass says which rows."""

    _rows: Rows | None = None
    _projector: Projector | None = None
    _state: Any = None
    _base: noise.Base | None = None
    _report: dict[str, Any] | None = None
    _underfit_advice = "The posterior underfits: use a smaller tolerance or a larger prior_precision."

    @abstractmethod
    def _open_rows(self, examples: Examples) -> JacobianRows:
        """Return the rows on the training data."""

    # --- fitting ------------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        n_samples: int = 30,
        *,
        projector: str | Projector = "auto",
        tolerance: float = 1e-2,
        base: noise.Base | None = None,
        generator: torch.Generator | None = None,
        memory_limit: int | str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> Self:
        """Draw samples whose predictions on the training data are those of the network.

        Parameters
        ----------
        loader : iterable of batches
            The training data, unshuffled and without augmentation.
        n_samples : int
            How many.
        projector : "auto" or Projector
            How to project; "auto" chooses by rows, parameters and memory, and says why in the report.
        tolerance : float
            What may be left of the noise's change of the training outputs, relative, for "auto".
        base : Tensor (S, P), mapping of named tensors (S, ...), or callable (n, generator) -> either
            Noise to project instead of N(0, I): samples of another posterior around the same parameters, as deviations
            from them. It carries its own scale, so "optimal" then means a precision of 1.
        generator : torch.Generator, optional
            The same seed gives the same samples, on any device.
        memory_limit : int or str, optional
            Bytes, or a string such as "8GB", to be used beside the model and the data; default 60 % of what is free,
            85 % on a GPU. ``nb.plan`` tells beforehand what will be. On a CPU the process itself takes a few MiB more,
            and the system's allocator may keep some tens of MiB that were freed. Where memory runs out all the same,
            the fit plans again with half of it, or halves the blocks of the projector that was asked for, and says so
            in the report's notes.
        checkpoint : path, optional
            A file in which an iterative projector keeps what it has reached, every few seconds. A fit that was killed,
            or interrupted with Ctrl-C, is called again as before with the same path: it goes on at the stored sweep and
            ends with the same samples, bit by bit, on the same machine. The seed is then the file's own; a generator
            need not be given again. The file is written once before any work, and a fit that cannot do so fails at
            once; later, when the disk is full, it warns and goes on. The file of another fit is refused, never
            overwritten. It is removed when the fit has finished. Five vectors a sample are written, and are in host
            memory once more while they are. Direct projectors have nothing to store.
        progress : bool
            Show a bar, on a terminal.
        """
        if (n_samples := whole(n_samples)) < 2:
            msg = f"n_samples must be at least 2 to speak of a variance, not {n_samples}."
            raise SettingsError(msg)
        self._base, self._likelihood = base, self._asked
        self._directions, self._precision, self._report = None, None, None
        with Progress(show=progress) as bar, Checkpoint(checkpoint) as store:
            asked = Asked(self._open(loader, bar), n_samples, projector, tolerance, memory_limit)
            based = None if base is None else lambda seed: noise.based(self._network, base, seed, 0, n_samples)
            seed, setup = store.begin(asked, None if generator is None else noise.draw_seed(generator), based)

            def work(setup: Setup) -> None:
                store.follow(setup)
                self._report = {**self._build(asked, setup), "seed": seed}
                self._draw(n_samples, bar, store)

            within_memory(asked, setup, work, self._forget)
        self._warn()
        return self

    def extend(self, n_samples: int, *, progress: bool = True) -> Self:
        """Draw more samples and keep the earlier ones: ``fit(10)`` and ``extend(20)`` are ``fit(30)``."""
        if (n_samples := whole(n_samples)) < 1:
            msg = f"n_samples must be at least 1, not {n_samples}."
            raise SettingsError(msg)
        self._need_state()
        with Progress(show=progress) as bar:
            self._draw(n_samples, bar)
        return self

    def prepare(
        self,
        loader: Iterable[Any],
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
            asked = Asked(self._open(loader, bar), self.n_samples, projector, tolerance, memory_limit)
            new: dict[str, Any] = {}
            within_memory(asked, set_up(asked), lambda setup: new.update(self._build(asked, setup)), self.release)
        old = dict(self._report or {})
        if new["n_rows"] != old["n_rows"]:
            self.release()
            msg = (
                f"The posterior was fitted to {old['n_rows']} rows, these data have {new['n_rows']}: pass those again."
            )
            raise DataError(msg)
        if new["data"] != old["data"]:
            self.release()
            msg = "These are other data than the posterior was fitted to: pass those again, in the same order."
            raise DataError(msg)
        self._report = old
        return self

    def release(self) -> Self:
        """Free the rows and the projector; predictions stay, ``extend`` and exact variances need ``prepare`` again."""
        self._rows = self._state = None
        return self

    def _forget(self) -> None:
        self.release()
        self._directions = None

    @full_precision()
    def _open(self, loader: Iterable[Any], bar: Progress) -> JacobianRows:
        """Read the data."""
        network = self._network
        network.check_unchanged()
        self._meter = meter = Meter(network.device, bar.phase)
        with meter.phase("data"):
            examples = Examples(loader, self._batch_fn, network.device)
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
        return {
            "projector": type(method).__name__, "reason": setup.reason, "route": rows.route,
            "n_data": len(rows.examples), "n_rows": rows.n_rows, "tolerance": method.rtol, "sweeps": 0, "residual": (),
            "converged": True, "traces": (), "rank": None, "output_std": output_std(rows),
            "notes": setup.notes, "data": rows.examples.fingerprint(),
        }  # fmt: skip

    @full_precision()
    def _draw(self, n_samples: int, bar: Progress, store: Checkpoint | None = None) -> None:
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
            if isinstance(self._projector, Iterative):
                projection = self._projector.apply(self._state, drawn, callback=callback, store=store)
            else:
                projection = self._projector.apply(self._state, drawn, callback=callback)
        info, new = projection.info, projection.directions[:n_samples]
        measured = slice(0, n_samples) if self._base is None else slice(n_samples, None)
        estimates = traces(drawn[measured].to(new.device), projection.directions[measured])
        directions = new if self._directions is None else torch.cat([self._directions, new])
        report["tolerance"] = max(report["tolerance"], self._projector.rtol)
        report["residual"] += tuple(float(r) for r in info.residual[:n_samples])
        report["converged"] &= bool(info.converged[:n_samples].all())
        report["sweeps"] = max(report["sweeps"], info.sweeps)
        report["traces"] += tuple(float(t) for t in estimates)
        report["rank"] = info.rank
        with self._meter.phase("measure"):
            report["train_std"] = train_std(self._jacobian, self._rows, directions)
        report["seconds"], report["peak_memory"] = dict(self._meter.seconds), self._meter.peak()
        self._directions, self._report = directions, report  # at the end: whoever is interrupted has all or nothing
        self._kernel_dimension = self._dimension()[0]
        if self._precision_rule in ("optimal", "paper"):
            self._precision = None  # the estimate of the rank has changed

    def _resolve_precision(self, rule: str | float) -> float:
        if isinstance(rule, str) and self._base is not None:
            return 1.0
        return super()._resolve_precision(rule)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def _dimension(self) -> tuple[float, float]:
        assert self._report is not None
        if self._report["rank"] is not None:
            return float(self._network.n_parameters - self._report["rank"]), 0.0
        estimates = torch.tensor(self._report["traces"], dtype=torch.float64, device="cpu")
        return mean_and_error(estimates, self._network.n_parameters)

    @property
    def report(self) -> FitReport:
        """What the fit measured, at the prior precision in use."""
        if self._report is None or "train_std" not in self._report:
            msg = f"{type(self).__name__} has no report yet: call fit(loader) first."
            raise NotFittedError(msg)
        values, p = self._report, self._network.n_parameters
        dimension, stderr = self._dimension()
        alpha = self.prior_precision
        return FitReport(
            projector=values["projector"], reason=values["reason"], route=values["route"], n_data=values["n_data"],
            n_rows=values["n_rows"], n_parameters=p, n_samples=self.n_samples, kernel_dimension=dimension,
            kernel_dimension_stderr=stderr, residual=tuple(values["residual"]), tolerance=values["tolerance"],
            converged=values["converged"], sweeps=values["sweeps"], prior_precision=alpha,
            train_std=values["train_std"] / alpha**0.5, output_std=values["output_std"],
            collapsed=dimension <= max(1.0, 1e-4 * p), seconds=dict(values["seconds"]),
            peak_memory=values["peak_memory"], notes=tuple(values.get("notes", ())),
        )  # fmt: skip

    def _warn(self) -> None:
        report = self.report
        if report.collapsed:
            message = (
                f"The posterior has collapsed on the trained network: of {report.n_parameters:,} parameters the "
                f"{report.n_rows:,} rows leave an effective kernel of {report.kernel_dimension:.1f} dimensions. "
                "Use a larger tolerance, the loss-projected posterior (one row an example), or fewer examples."
            )
            warnings.warn(message, CollapseWarning, stacklevel=3)
        elif report.train_std > 0.25 * report.output_std > 0:
            message = (
                f"On the training data the outputs vary by {report.train_std:.2g} (standard deviation), not small "
                f"beside their own spread of {report.output_std:.2g}. {self._underfit_advice}"
            )
            warnings.warn(message, UnderfitWarning, stacklevel=3)

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
            error, at the price of one projection an output. An iterative projector takes the steps that it takes
            for the samples, so that its tolerance leaves as much of a row as of the noise.
        """
        if not exact:
            return self.predict(x).variance
        self._need_state()
        if self._base is not None:
            msg = "The exact variance is known for the base distribution N(0, I) only: use exact=False."
            raise SettingsError(msg)
        assert self._projector is not None
        assert self._report is not None
        few = min(_LEADERS, self.n_samples)
        leaders = self._projector.leaders(self._state, noise.normal(self._network, self._report["seed"], 0, few))
        most = self._report["sweeps"]  # of a fit that was interrupted: its samples had no more
        leaders = [dataclasses.replace(leader, sweeps=min(leader.sweeps, most)) for leader in leaders]
        parts = [self._projected_squares(piece, leaders) for piece in self._few_rows(x)]
        return torch.cat(parts) / self.prior_precision

    def _few_rows(self, x: Any) -> Iterator[Any]:
        """Iterate over inputs, so many at a time that their rows take no more memory than samples do."""
        for piece in stream(x, self._network, self._batch_fn, n_samples=256):
            step = max(1, self._at_once() // math.prod(self._network.output_shape(piece)))
            for start in range(0, n_examples(piece), step):
                yield take_examples(piece, start, start + step)

    def _projected_squares(self, x: Any, leaders: list[Leader]) -> Tensor:  # (n, ...)
        """Return the squared length of what the samples see of each row of the outputs, in the mean over them."""
        assert self._projector is not None
        rows, parts = output_rows(self._network, x), []  # (n, ..., P)
        for some in rows.flatten(0, -2).split(self._at_once()):
            shares = [
                leader.share * self._projector.follow(self._state, leader, some).square().sum(1) for leader in leaders
            ]
            parts.append(torch.stack(shares).sum(0))
        return torch.cat(parts).view(rows.shape[:-1])

    def _at_once(self) -> int:
        """Return how many vectors may be projected together: at least as many as the fit was planned for."""
        width = _VECTORS * self._network.n_parameters * self._network.dtype.itemsize
        return max(self.n_samples, self._jacobian.working_bytes // width)

    @full_precision()
    def optimize_prior_precision(self, loader: Iterable[Any], method: str = "closed_form") -> float:
        """Choose the prior precision, set it and return it.

        Parameters
        ----------
        loader : iterable of batches
            Held-out data for "nll", the training data for "marglik"; "closed_form" does not read it.
        method : "closed_form", "nll" or "marglik"
            The optimum of the projected marginal likelihood; the best log-likelihood of the mean prediction on the
            data; or the optimum of the marginal likelihood of linearized Laplace, with the Gauss-Newton matrix proper.
        """
        _ = self.directions  # says what to do before fit
        if method == "closed_form":
            best = super()._resolve_precision("optimal")
        elif method == "nll":
            best = self._tune_nll(loader)
        elif method == "marglik":
            self._network.check_unchanged()
            examples = Examples(loader, self._batch_fn, self._network.device)
            rows = OutputJacobian(self._network, examples, self._likelihood, hessian=True)
            values, weights = priors.spectrum(rows, torch.Generator().manual_seed(0))
            best = priors.best_evidence(values, weights, self._theta_squared())
        else:
            msg = f'method must be "closed_form", "nll" or "marglik", not {method!r}.'
            raise SettingsError(msg)
        self.prior_precision = best
        return best

    def _need_state(self) -> None:
        _ = self.directions  # says what to do before fit
        self._network.check_unchanged()
        if self._state is None:
            msg = (
                "This needs the projector over the training rows, which a file does not hold: "
                "call prepare(loader) first."
            )
            raise NotFittedError(msg)

    # --- files --------------------------------------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        if self._report is None:
            return {}
        return {"report": self._report, "based": self._base is not None}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        report = dict(header["report"])
        for name in ("residual", "traces"):
            report[name] = tuple(float(v) for v in report[name])
        self._report = report
        self._base = noise.lost if header["based"] else None
        if self.report.n_samples != len(report["residual"]):
            msg = "The file's report does not fit its samples: it was altered."
            raise FileError(msg)
