"""What a fit measured: one value, which the report shows and a posterior file holds."""

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
from nullbayes.projectors import mean_and_error


@dataclass(frozen=True)
class Measured:
    """What a fit measured, at a prior precision of 1. The report in a posterior file has the same fields.

    Attributes
    ----------
    projector, reason, route : str
        The projector that was used and why, and how the rows were formed.
    n_data, n_rows, n_counted : int
        Training examples, their rows, and the rows without those of ignored positions, which are zero.
    data, seed, based : str, int, bool
        Fingerprint of the training data, the seed of the samples, and whether they have a base distribution.
    output_std : float
        The spread of the network's own training outputs.
    residual, tolerance : tuple of float, float
        ``|A v| / |A noise|`` per sample, as in :class:`Info <nullbayes.projectors.Info>`, and the largest allowed.
    converged, sweeps, sweeps_per_sample : bool, int, tuple of int
        Whether every sample reached the tolerance, and the number of passes over the rows, in all and per sample.
    settings : str
        The projector with its settings; empty if the samples were drawn by several.
    rank, traces : int or None, tuple of float
        The rank of the rows, where the projector decides one; estimates of the dimension of their null space.
    train_std : float
        Root mean square standard deviation that remains on the training outputs, in their own units.
    worst_ratio : float or None
        The largest ratio of the standard deviation of an output to its spread; None for one output, or for classes.
    train_loss_std : float or None
        Root mean square change of the training losses to first order, in nats; None for rows of outputs.
    seconds, peak_memory : dict, int or None
        Time per phase, and bytes beyond what the process held when the fit began.
    promise : Promise or None
        The measurements that the default precision was chosen by.
    notes : tuple of str
        What else happened: that memory ran out, for example, and how the fit continued.
    """

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
