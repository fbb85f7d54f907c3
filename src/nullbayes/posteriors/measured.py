"""What a fit measured, as one value that the report shows and a posterior file holds; and what a check of it found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes import priors
from nullbayes.errors import SettingsError
from nullbayes.posteriors.header import MOST_NOTES, Amount, Count, Notes, fields_of
from nullbayes.posteriors.promise import Promise
from nullbayes.projectors.stopping import mean_and_error


@dataclass(frozen=True)
class Measured:
    """What a fit measured, at a prior precision of 1; see :class:`FitReport` for the fields, which a file holds too."""

    projector: str
    reason: str
    route: str
    n_data: Count
    n_rows: Count
    n_counted: Count
    data: str
    output_std: Amount
    seed: Count
    based: bool
    tolerance: Amount
    residual: tuple[Amount, ...]
    converged: bool
    sweeps: Count
    sweeps_per_sample: tuple[Count, ...]
    settings: str
    rank: Count | None
    traces: tuple[float, ...]
    train_std: Amount
    worst_ratio: Amount | None
    train_loss_std: Amount | None
    seconds: dict[str, Amount]
    peak_memory: Count | None
    promise: Promise | None
    notes: Notes

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dictionaries, for JSON."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def dimension(self, n_parameters: int) -> tuple[float, float]:
        """Return the effective dimension of the null space, and its standard error."""
        if self.rank is not None:
            return float(n_parameters - self.rank), 0.0
        return mean_and_error(torch.tensor(self.traces, dtype=torch.float64, device="cpu"), n_parameters)

    def precision(self, rule: str | float, theta: Tensor) -> float:  # (P,)
        """Return the prior precision that a rule stands for; samples of a base distribution carry their own scale."""
        if not isinstance(rule, str):
            return float(rule)
        optimal = 1.0 if self.based else self.closed_form(theta)
        if rule != "auto":
            return 1.0 / optimal if rule == "paper" else optimal
        if self.promise is None:
            msg = 'prior_precision="auto" is measured during a fit that has it from the start: fit again, or tune().'
            raise SettingsError(msg)
        return max(optimal, self.promise.needed)

    def closed_form(self, theta: Tensor) -> float:  # (P,)
        """Return the precision of the largest projected marginal likelihood."""
        norm, size = float(theta.double().square().sum()), len(theta)
        return priors.closed_form(size, self.dimension(size)[0], norm)


@dataclass(frozen=True)
class FitCheck:
    """How far a posterior's predictions moved from the network's own on some data.

    Attributes
    ----------
    n_data : int
        Examples checked.
    mean_shift, max_shift : float
        Root mean square and largest distance of the mean outputs from the network's, in units of the outputs. They are
        zero up to rounding for linearized predictions, whose mean is the network's output.
    std : float
        Root mean square standard deviation of the outputs.
    output_std : float
        The spread of the network's own outputs, to compare these with.
    worst_ratio : float or None
        The largest ratio of the standard deviation of an output to its spread, for several outputs with units of
        their own.
    nll_model, nll_posterior : float
        Negative log-likelihood per target, of the network and of the posterior's prediction, both at the posterior's
        temperature.
    accuracy_model, accuracy_posterior : float or None
        Share of right classes (or right labels); None for likelihoods without classes.
    temperature : float
        Of the posterior.
    nll_untempered : float
        Negative log-likelihood per target of the network as it is, at temperature 1. A temperature that held-out data
        chose takes back what a network is too sure of on its training data, so that ``nll_model`` is larger there by
        design; a posterior keeps its promise if it is as good as ``nll_model``.

    Examples
    --------
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 2, bias=False), torch.eye(4), torch.tensor([0, 1, 0, 1])
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], y[:2])
    >>> check = posterior.check_fit(x, y)
    >>> check.std > 0.1, abs(check.mean_shift) < 1e-6, check.accuracy_model == check.accuracy_posterior
    (True, True, True)
    """

    n_data: int
    mean_shift: float
    max_shift: float
    std: float
    output_std: float
    worst_ratio: float | None
    nll_model: float
    nll_posterior: float
    accuracy_model: float | None
    accuracy_posterior: float | None
    temperature: float
    nll_untempered: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Lay the check out as a table."""
        lines = [
            f"{self.n_data:,} examples; outputs spread by {self.output_std:.3g}",
            f"mean outputs moved by {self.mean_shift:.2g} (at most {self.max_shift:.2g}), "
            f"standard deviation {self.std:.2g}",
            "",
            f"{'':<28} {'nll':>9}" + ("" if self.accuracy_model is None else "  accuracy"),
            *(
                f"{name:<28} {nll:9.4f}" + ("" if share is None else f"  {share:8.4f}")
                for name, nll, share in self.rows()
            ),
        ]
        return "\n".join([*lines, *([] if self.temperature == 1.0 else ["", self.why()])])

    def rows(self) -> list[tuple[str, float, float | None]]:
        """Return what is compared, with its negative log-likelihood per target and its accuracy.

        These are the network, the network at the posterior's temperature if that is not 1, and the posterior.
        """
        tempered = (f"network at temperature {self.temperature:.3g}", self.nll_model, self.accuracy_model)
        return [
            ("network", self.nll_untempered, self.accuracy_model),
            *([] if self.temperature == 1.0 else [tempered]),
            ("posterior", self.nll_posterior, self.accuracy_posterior),
        ]

    def why(self) -> str:
        """Say which network the posterior is compared with, and why."""
        if self.temperature == 1.0:
            return "The posterior is compared with the network."
        return (
            f"The posterior predicts at a temperature of {self.temperature:.3g}, so it is compared with the network at "
            "the same temperature: one that suits new data is not the best one for training data."
        )


REPORT = fields_of(Measured)  # in a file


def from_header(values: Mapping[str, Any]) -> Measured:
    """Return what the header of a file says that a fit measured."""
    promise = None if values["promise"] is None else Promise(**values["promise"])
    lists = {name: tuple(float(number) for number in values[name]) for name in ("residual", "traces")}
    plain = {name: tuple(values[name]) for name in ("sweeps_per_sample", "notes")}
    return Measured(**{**values, **lists, **plain, "promise": promise})


def merged(old: Measured, new: Measured) -> Measured:
    """Return what was measured on earlier samples and on new ones together."""
    have, more = len(old.residual), len(new.residual)

    def pooled(before: float, after: float) -> float:
        return math.sqrt((more * after**2 + have * before**2) / (have + more))

    def pooled_or_none(before: float | None, after: float | None) -> float | None:
        return None if after is None else pooled(before or 0.0, after)

    return dataclasses.replace(
        old,
        tolerance=max(old.tolerance, new.tolerance),
        residual=old.residual + new.residual,
        converged=old.converged and new.converged,
        sweeps=max(old.sweeps, new.sweeps),
        sweeps_per_sample=old.sweeps_per_sample + new.sweeps_per_sample,
        settings=old.settings if old.settings == new.settings else "",
        rank=new.rank,
        traces=old.traces + new.traces,
        train_std=pooled(old.train_std, new.train_std),
        worst_ratio=pooled_or_none(old.worst_ratio, new.worst_ratio),
        train_loss_std=pooled_or_none(old.train_loss_std, new.train_loss_std),
        notes=tuple(dict.fromkeys([*old.notes, *new.notes]))[-MOST_NOTES:],
    )


def timed(measured: Measured, seconds: Mapping[str, float], peak_memory: int | None) -> Measured:
    """Return the same with more seconds per phase, and with another peak of memory if it is higher."""
    total = {n: measured.seconds.get(n, 0.0) + seconds.get(n, 0.0) for n in {**measured.seconds, **seconds}}
    peaks = [peak for peak in (measured.peak_memory, peak_memory) if peak is not None]
    return dataclasses.replace(measured, seconds=total, peak_memory=max(peaks, default=None))
