"""What a fit measured."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from nullbayes.errors import CollapseWarning, DataError, UnderfitWarning
from nullbayes.posteriors.promise import NATS, Promise
from nullbayes.projectors import Info, mean_and_error

_LEFT = ("train_std", "worst_ratio", "train_loss_std")
_NO_NULL_SPACE = (
    "there are at least as many rows as parameters, so no null space in the strict sense: how much variance is left "
    "depends on the tolerance, and the size of a variance means nothing by itself"
)
_SAME = (  # as measured, whatever the precision is
    "projector", "reason", "route", "n_data", "n_rows", "n_counted", "tolerance", "converged", "sweeps", "output_std",
    "peak_memory",
)  # fmt: skip
_MUCH = 0.25  # of the spread of the outputs, for a standard deviation on training data


@dataclass(frozen=True)
class FitReport:
    """How a fit went; prints as a short table.

    Attributes
    ----------
    projector, reason : str
        What was used, and why.
    route : str
        How the rows were formed.
    n_data, n_rows, n_counted, n_parameters, n_samples : int
        The problem; ``n_data`` counts the examples that were seen, ``n_counted`` the rows without those of ignored
        positions, which are zero.
    kernel_dimension, kernel_dimension_stderr : float
        Effective dimension of the space that the samples live in, with its standard error.
    residual : tuple of float
        ``|A v| / |A noise|`` for each sample, as in :class:`Info <nullbayes.projectors.Info>`.
    tolerance : float
        What the residual of each sample may be at most.
    converged : bool
        Whether every sample reached it.
    sweeps : int
        Passes over the rows.
    prior_precision : float
        In use now.
    precision_rule : str
        "auto", "optimal" or "paper"; empty where it is a number.
    temperature : float
        In use now.
    promise : Promise or None
        What the default precision was chosen by; None where the precision was given, or chosen on held-out data.
    train_std : float
        Root mean square standard deviation that is left on the training outputs, in their own units, at that precision.
    worst_ratio : float or None
        The same for each of several outputs, as a part of its own spread: the largest; None for one output, or classes.
    train_loss_std : float or None
        Root mean square change of the training losses to first order, in nats, at that precision; None for rows of
        outputs.
    output_std : float
        The spread of the network's own training outputs, to compare it with.
    collapsed : bool
        Whether next to nothing is left of the noise.
    seconds : dict
        By phase.
    peak_memory : int or None
        In bytes, beyond what the process held when the fit began.
    notes : tuple of str
        What else happened: memory that ran out, and how the fit went on.
    """

    projector: str
    reason: str
    route: str
    n_data: int
    n_rows: int
    n_counted: int
    n_parameters: int
    n_samples: int
    kernel_dimension: float
    kernel_dimension_stderr: float
    residual: tuple[float, ...]
    tolerance: float
    converged: bool
    sweeps: int
    prior_precision: float
    precision_rule: str
    temperature: float
    promise: Promise | None
    train_std: float
    worst_ratio: float | None
    train_loss_std: float | None
    output_std: float
    collapsed: bool
    seconds: dict[str, float]
    peak_memory: int | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings and lists, for JSON."""
        return {**dataclasses.asdict(self), "residual": list(self.residual), "notes": list(self.notes)}

    @classmethod
    def of(
        cls,
        measured: Mapping[str, Any],
        n_parameters: int,
        n_samples: int,
        alpha: float,
        temperature: float,
        rule: str | float,
    ) -> Self:
        """Make the report of what a fit has measured, for the prior precision ``alpha`` in use by a rule."""
        size, stderr = dimension(measured, n_parameters)
        losses, worst = measured["train_loss_std"], measured["worst_ratio"]
        return cls(
            **{name: measured[name] for name in _SAME},
            n_parameters=n_parameters, n_samples=n_samples, kernel_dimension=size, kernel_dimension_stderr=stderr,
            residual=tuple(measured["residual"]), prior_precision=alpha, train_std=measured["train_std"] / alpha**0.5,
            collapsed=size <= max(1.0, 1e-4 * n_parameters), seconds=dict(measured["seconds"]),
            notes=tuple(measured["notes"]), temperature=temperature,
            precision_rule=rule if isinstance(rule, str) else "",
            worst_ratio=None if worst is None else worst / alpha**0.5,
            train_loss_std=None if losses is None else losses / alpha**0.5,
            promise=measured["promise"] if rule == "auto" else None,
        )  # fmt: skip

    def __str__(self) -> str:
        """Lay the report out as a table."""
        share = self.kernel_dimension / self.n_parameters
        ignored = "" if self.n_counted == self.n_rows else f" ({self.n_counted:,} count, the rest is ignored)"
        within = "reached" if self.converged else "NOT reached"
        memory = (
            "unknown"
            if self.peak_memory is None
            else f"{self.peak_memory / 2**30:.2f} GiB at the peak, beside what there was"
        )
        lines = [
            ("projector", f"{self.projector}: {self.reason}"),
            ("rows", f"{self.n_rows:,} of {self.n_data:,} examples{ignored}, {self.route}"),
            ("parameters", f"{self.n_parameters:,}"),
            ("samples", f"{self.n_samples}"),
            (
                "kernel dimension",
                f"{self.kernel_dimension:,.1f} ± {self.kernel_dimension_stderr:.1f} ({share:.1%} of the parameters)"
                + (", COLLAPSED" if self.collapsed else ""),
            ),
            (
                "residual",
                f"{max(self.residual):.1e} at worst, tolerance {self.tolerance:.1e} {within}, {self.sweeps} sweeps",
            ),
            ("prior precision", f"{self.prior_precision:.4g}{self._why()}"),
            *([("temperature", f"{self.temperature:.3g}")] if self.temperature != 1.0 else []),
            *([] if self.promise is None else [("promise", self._kept(self.promise))]),
            (
                "std on training",
                f"{self.train_std:.3g} (the outputs themselves spread by {self.output_std:.3g})"
                + ("" if self.worst_ratio is None else f", of one output by {self.worst_ratio:.2g} of its spread")
                + ("" if self.train_loss_std is None else f", losses {self.train_loss_std:.2g} nats"),
            ),
            *([("read it so", _NO_NULL_SPACE)] if self.sized_by_tolerance else []),
            ("time", ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())),
            ("memory", memory),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{name:<17} {value}" for name, value in lines)

    @property
    def sized_by_tolerance(self) -> bool:
        """Whether the rows that count are as many as the parameters: the tolerance then sets the size of variances."""
        return self.n_counted >= self.n_parameters

    def _why(self) -> str:
        """Say how the precision came about."""
        if self.promise is None:
            return f", {self.precision_rule}" if self.precision_rule else ""
        if self.prior_precision > self.promise.needed:
            return ", auto: the closed form, which keeps the promise as it is"
        what = "accuracy" if self.promise.decided_by == "accuracy" else f"NLL within {NATS:g} nats"
        where = "kept apart" if self.promise.needed_apart >= self.promise.needed_inside else "in the rows"
        return f", auto: raised to keep the {what} on training examples {where}"

    def _kept(self, promise: Promise) -> str:
        """Say what became of the predictions on training data."""
        nll = f"NLL {promise.nll_network:.4f} -> {promise.nll_posterior:.4f} on training examples"
        if promise.accuracy_network is not None and promise.accuracy_posterior is not None:
            nll += f", accuracy {promise.accuracy_network:.4f} -> {promise.accuracy_posterior:.4f}"
        apart = promise.apart_std / self.prior_precision**0.5
        return f"{nll}; std of inputs like them at most {apart:.3g}"


def dimension(measured: Mapping[str, Any], n_parameters: int) -> tuple[float, float]:
    """Return the dimension of the space that the samples live in, and its standard error."""
    if measured["rank"] is not None:
        return float(n_parameters - measured["rank"]), 0.0
    return mean_and_error(torch.tensor(measured["traces"], dtype=torch.float64, device="cpu"), n_parameters)


def added(
    measured: Mapping[str, Any],
    info: Info,
    traces: Iterable[float],
    left: Iterable[float | None],
    rtol: float,
    n_new: int,
) -> dict[str, Any]:
    """Return what a fit has measured once ``n_new`` more samples are drawn.

    ``left`` are the standard deviations of training outputs, the worst of them as a part of the output's spread, and
    those of training losses, where they were measured.
    """
    have = len(measured["residual"])

    def pooled(name: str, new: float | None) -> float | None:
        old = measured.get(name) or 0.0
        return None if new is None else math.sqrt((n_new * new**2 + have * old**2) / (have + n_new))

    return {
        "tolerance": max(measured["tolerance"], rtol),
        "residual": measured["residual"] + tuple(float(r) for r in info.residual[:n_new]),
        "converged": measured["converged"] and bool(info.converged[:n_new].all()),
        "sweeps": max(measured["sweeps"], info.sweeps),
        "traces": measured["traces"] + tuple(float(t) for t in traces),
        "rank": info.rank,
        **{name: pooled(name, new) for name, new in zip(_LEFT, left, strict=True)},
    }


def check_same_data(new: Mapping[str, Any], fitted: Mapping[str, Any]) -> None:
    """Refuse other data than a posterior was fitted to."""
    if new["n_rows"] != fitted["n_rows"]:
        was, now = fitted["n_rows"], new["n_rows"]
        msg = f"The posterior was fitted to {was} rows, these data have {now}: pass those again."
        raise DataError(msg)
    if new["data"] != fitted["data"]:
        msg = "These are other data than the posterior was fitted to: pass those again, in the same order."
        raise DataError(msg)


def warn_of(report: FitReport, underfit_advice: str) -> None:
    """Warn the caller of a fit that left nothing open, or too much."""
    if report.collapsed:
        message = (
            f"The posterior has collapsed on the trained network: of {report.n_parameters:,} parameters the "
            f"{report.n_rows:,} rows leave an effective kernel of {report.kernel_dimension:.1f} dimensions. "
            "Use a larger tolerance, the loss-projected posterior (one row an example), or fewer examples."
        )
        warnings.warn(message, CollapseWarning, stacklevel=3)
    elif report.promise is not None:
        _warn_of_promise(report, report.promise)
    elif (report.worst_ratio or 0.0) > _MUCH:
        message = (
            f"On the training data one of the outputs varies by {report.worst_ratio:.2g} times its own spread "
            f"(standard deviation). {underfit_advice}"
        )
        warnings.warn(message, UnderfitWarning, stacklevel=3)
    elif report.train_std > _MUCH * report.output_std > 0:
        message = (
            f"On the training data the outputs vary by {report.train_std:.2g} (standard deviation), not small "
            f"beside their own spread of {report.output_std:.2g}. {underfit_advice}"
        )
        warnings.warn(message, UnderfitWarning, stacklevel=3)


def _warn_of_promise(report: FitReport, promise: Promise) -> None:
    if not promise.kept:
        message = (
            f"The posterior does not keep its promise: on training examples the negative log-likelihood goes from "
            f"{promise.nll_network:.4g} to {promise.nll_posterior:.4g}. Use a larger prior_precision."
        )
        warnings.warn(message, UnderfitWarning, stacklevel=4)
    elif report.prior_precision <= promise.needed and not promise.visible(report.prior_precision, report.output_std):
        apart = promise.apart_std / report.prior_precision**0.5
        message = (
            f"To predict as well as the network does, the posterior keeps a standard deviation of only {apart:.2g} on "
            f"inputs like the training data, whose outputs spread by {report.output_std:.2g}: it is next to nothing. "
            "Scores still rank inputs. For a variance to read, pass held-out data, fit(loader, held_out=...)."
        )
        warnings.warn(message, CollapseWarning, stacklevel=4)
