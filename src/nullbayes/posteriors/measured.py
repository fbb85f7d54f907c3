"""What a fit measures on its samples, as one value that the report shows and a posterior file holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.jacobians import LossJacobian, OutputJacobian
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors.arguments import Noise
from nullbayes.posteriors.header import MOST_NOTES, Amount, Count, Notes, fields_of
from nullbayes.posteriors.plan import Prepared, described
from nullbayes.posteriors.promise import Promise
from nullbayes.projectors import Info
from nullbayes.projectors.stopping import mean_and_error

_CONSTANT = 1e-6  # of the largest spread
_MEASURED = 1024  # training examples on which the change of the outputs is measured, where the rows do not tell


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


def measure(prepared: Prepared, noise: Noise, directions: Tensor, info: Info, estimates: Tensor) -> Measured:
    """Measure new directions (S, P); ``estimates`` are those of the dimension of the null space."""
    jacobian, plan, n = prepared.jacobian, prepared.plan, len(directions)
    std, ratio = train_std(jacobian, prepared.rows, directions)
    return Measured(
        projector=type(plan.projector).__name__,
        reason=plan.reason,
        route=jacobian.route,
        n_data=jacobian.examples.n_all,
        n_rows=prepared.rows.n_rows,
        n_counted=jacobian.n_counted,
        data=jacobian.examples.fingerprint(),
        output_std=jacobian.output_std,
        seed=noise.seed,
        based=noise.base is not None,
        tolerance=plan.projector.rtol,
        residual=tuple(info.residual[:n].tolist()),
        converged=bool(info.converged[:n].all()),
        sweeps=info.sweeps,
        sweeps_per_sample=tuple(info.sweeps_per_sample[:n].tolist()),
        settings=described(plan.projector),
        rank=info.rank,
        traces=tuple(estimates.tolist()),
        train_std=std,
        worst_ratio=ratio,
        train_loss_std=loss_std(jacobian, prepared.rows, directions),
        seconds={},
        peak_memory=None,
        promise=None,
        notes=plan.notes,
    )


def train_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> tuple[float, float | None]:  # (S, P)
    """Return the standard deviation of the training outputs that count, and the worst ratio to an output's spread.

    ``rows`` are those of ``jacobian`` as they are held. If they are the outputs' own, they tell; otherwise the change
    of the outputs is measured on some of the examples. There is no ratio for a single output, or for classes.
    """
    own = isinstance(jacobian, OutputJacobian) and not jacobian.hessian
    stds = jacobian.output_stds
    if own and (stds is None or len(stds) == 1):
        return float((rows.norms(directions).square().mean() / jacobian.n_counted).sqrt()), None
    total, n_counted, each = 0.0, 0, None
    for changes, counted in _own_changes(rows, directions, jacobian) if own else _changes(jacobian, directions):
        total += float(changes.square().sum())
        n_counted += counted
        if stds is not None:
            squares = changes.square().sum((0, 1))
            each = squares if each is None else each + squares
    if not own:  # else the changes are those of all processes
        total, n_counted = map(sum, zip(*jacobian.examples.group.gather((total, n_counted)), strict=True))
        each = None if each is None else jacobian.examples.group.sum(each)
    std = math.sqrt(total / max(1, n_counted) / len(directions))
    if each is None or stds is None or len(stds) == 1:
        return std, None
    return std, worst_ratio((each * len(stds) / max(1, n_counted) / len(directions)).sqrt(), stds)


def worst_ratio(stds: Tensor, spreads: Tensor) -> float | None:  # (O,), (O,)
    """Return the largest ratio of a standard deviation to the spread of its output; constant outputs have none."""
    alive = spreads > _CONSTANT * spreads.max()
    return float((stds[alive] / spreads[alive]).max()) if bool(alive.any()) else None


def _own_changes(rows: Rows, directions: Tensor, jacobian: JacobianRows) -> Iterator[tuple[Tensor, int]]:
    """Yield the change of all outputs, (S, n, O), and their number."""
    changes = rows.mv(directions).double().view(len(directions), -1, jacobian.rows_per_example)
    yield changes, changes[0].numel()


def _changes(jacobian: JacobianRows, directions: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Iterate over the change of the outputs that count, (S, n, ...), on some examples, and their number."""
    examples = jacobian.examples
    step = max(1, examples.n_all // _MEASURED) * 32
    at_once = min(32, jacobian.examples_within(len(directions)))
    for start in range(0, len(examples), step):
        for a, b in examples.ranges(at_once, start, min(start + 32, len(examples))):
            x, y = examples.read(a, b)
            own, changes = linearized(jacobian.network, x, directions)
            counted = jacobian.likelihood.counted(own, y)
            changes = changes.double() if counted is None else changes.double() * counted
            yield changes, own.numel() if counted is None else int(counted.sum())


def loss_std(jacobian: JacobianRows, rows: Rows, directions: Tensor) -> float | None:  # (S, P)
    """Return the standard deviation of the training losses to first order, if the rows are those of losses."""
    if not isinstance(jacobian, LossJacobian):
        return None
    return float((rows.norms(directions).square().mean() / rows.n_rows).sqrt())


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
