"""What a fit measured, as one value that the report shows and a posterior file holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        return closed_form(size, self.dimension(size)[0], norm)


def closed_form(n_parameters: int, kernel_dimension: float, theta_squared: float) -> float:
    r"""Return :math:`\alpha^* = (P - \operatorname{tr}(I - A^+A)) / \|\theta\|^2`, the rank over the squared norm.

    It is the stationary point of :math:`-\tfrac\alpha2\|\theta\|^2 + \tfrac{\text{rank}}2 \log\alpha`. Lemma 3.4 of
    the paper prints its reciprocal; see ``docs/errata.md``.
    """
    rank = n_parameters - kernel_dimension
    if rank <= 0:
        msg = (
            "There is no optimal prior precision, because the rows have rank zero, so that the training data hold "
            "nothing. The losses of a network that fits its data exactly have no gradient: use ProjectedPosterior, "
            "which holds the outputs."
        )
        raise SettingsError(msg)
    if theta_squared <= 0:
        msg = "There is no optimal prior precision, because all parameters are zero: pass prior_precision=<a number>."
        raise SettingsError(msg)
    return rank / theta_squared


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
