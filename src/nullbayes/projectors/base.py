r"""What every projector promises: ``prepare`` once, ``apply`` many times, and an honest account of the result.

One stopping sentence holds for all of them, sample by sample, on a residual recomputed from the rows:

.. math:: \|A v\| \le \max(\text{atol}, \text{rtol} \cdot \|A \varepsilon\|).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from nullbayes.errors import ConvergenceWarning, NullBayesError, SettingsError, warn
from nullbayes.linalg.rows import Rows
from nullbayes.precision import full_precision

Callback = Callable[[int, Tensor], None]  # (sweeps so far, relative residual of each sample)

BLOCKS_INSTEAD = (
    "use nb.projectors.Krylov(nb.projectors.Alternating(block_rows=...)), which needs no matrix of all rows"
)
_DIGITS = 100.0  # eps of the numbers: a residual as small as that is rounding
_NOT_FINITE = "The projection produced NaN or Inf: look for extreme values in the rows."


class Store(Protocol):
    """Where an iteration leaves its state, named tensors, for another one to go on from."""

    def load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state to begin with: what was saved of the same problem, or else the one given."""

    def save(self, state: Mapping[str, Tensor], *, interrupted: bool = False) -> None:
        """Take the state after a step, or pass it over, as time allows; that of an interruption is always taken."""


class Outcome(Enum):
    """How a projection ended; the value says what to do about it."""

    CONVERGED = "every sample reached the tolerance"
    MAX_SWEEPS = (
        "the sweeps ran out: allow more (max_sweeps), take larger blocks (block_rows), use Krylov instead of "
        "Alternating, or accept a larger tolerance"
    )
    STAGNATED = (
        "no progress any more, from rounding or from nearly parallel blocks: use float64 parameters, larger blocks "
        "(block_rows), or accept a larger tolerance"
    )
    TRUNCATED = "the rank allowed is too small for the tolerance: raise it, or use another projector"
    PRECISION = (
        "the tolerance is finer than the precision of the numbers: use float64 parameters, or accept a larger tolerance"
    )
    ROUNDED = (
        "the rows are held in half precision, and their rounding is more than the tolerance allows: allow more memory "
        "(memory_limit), or accept a larger tolerance"
    )
    INTERRUPTED = (
        "stopped by the user: the samples are as the last finished sweep left them, and usable as such; fit again to "
        "reach the tolerance, or extend with samples that do"
    )


@dataclass(frozen=True)
class Info:
    """How a projection went.

    Attributes
    ----------
    projector : str
        Name of the method.
    outcome : Outcome
        How it ended, with advice.
    residual : Tensor (S,)
        ``|A v| / |A noise|`` for each sample, recomputed from the rows; 0 where ``A noise`` is 0. A direct method
        removes what the tolerance asks for in the mean over noise: it takes that mean of ``|A noise|``, for noise as
        long as the sample's, where the sample's own is smaller. A sample that has converged is within the tolerance.
    converged : Tensor (S,)
        Whether it meets the stopping sentence.
    sweeps : int
        Passes over all blocks.
    rank : int or None
        Of the rows, where the method decides one.
    kernel_dimension, kernel_dimension_stderr : float
        Trace of the map from noise to directions; estimated from ``noise · v`` unless the rank is known.
    precision : str
        In which the factors were computed.
    cutoff : float or None
        Relative to the largest eigenvalue: what lies below it was taken for zero.
    """

    projector: str
    outcome: Outcome
    residual: Tensor
    converged: Tensor
    sweeps: int
    rank: int | None
    kernel_dimension: float
    kernel_dimension_stderr: float
    precision: str
    cutoff: float | None = None


@dataclass(frozen=True)
class Projection:
    """The directions, in the kernel up to what ``info`` says."""

    directions: Tensor  # (S, P)
    info: Info


@dataclass(frozen=True)
class Leader:
    """A sample that others are like: its noise (1, P), the sweeps that it takes, and the share of those like it."""

    noise: Tensor
    sweeps: int
    share: float


class Projector(ABC):
    r"""A way to compute :math:`v = (I - A^+ A) \varepsilon`."""

    rtol: float
    atol: float

    @property
    def memory_advice(self) -> str:
        """Say which setting to lower when memory runs out."""
        return "lower n_samples"

    def block_size(self, rows: Rows) -> int | None:
        """Return how many rows a block has, or None for a method that does not work by blocks."""
        return None

    def smaller(self, rows: Rows) -> Projector | None:
        """Return the same projector with blocks of half as many rows, or None where they cannot be smaller."""
        return None

    def __init_subclass__(cls) -> None:
        """Have every projector, a user's own as well, compute in full precision whoever calls it."""
        for name in ("prepare", "apply"):
            if name in cls.__dict__:
                setattr(cls, name, full_precision()(cls.__dict__[name]))

    @abstractmethod
    def prepare(self, rows: Rows) -> Any:
        """Do the work that needs no noise; the state serves every later :meth:`apply`."""

    @abstractmethod
    def apply(self, state: Any, noise: Tensor, *, callback: Callback | None = None) -> Projection:
        """Project each row of ``noise`` (S, P)."""

    def leaders(self, state: Any, noise: Tensor, most_sweeps: int | None = None) -> list[Leader]:  # (S, P)
        """Return the few samples whose maps stand for those of all; a direct method has one map for all noise."""
        return [Leader(noise[:1].clone(), 0, 1.0)]

    def follow(self, state: Any, leader: Leader, vectors: Tensor) -> Tensor:  # (m, P) -> (m, P)
        r"""Return :math:`T^\top w` for each vector, where :math:`T` takes the leader's noise to its direction.

        A sample :math:`v = T \varepsilon` has :math:`\|T^\top w\|^2` as the variance of :math:`w^\top v`. The map of a
        direct method is symmetric.
        """
        projection = self.apply(state, vectors)
        if projection.info.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt  # half a projection is another map
        return projection.directions


class _EnoughError(Exception):
    """An iteration has gone as far as it should."""


class Iterative(Projector):
    """A projector that works step by step, so that it can stop after one and go on later."""

    @abstractmethod
    def apply(
        self, state: Any, noise: Tensor, *, callback: Callback | None = None, store: Store | None = None
    ) -> Projection:
        """Project each row of ``noise`` (S, P), from where ``store`` says that an earlier projection was."""

    def leaders(self, state: Any, noise: Tensor, most_sweeps: int | None = None) -> list[Leader]:
        """Return one sample for each number of sweeps that samples take, or took until they were stopped."""
        taken, latest = [0] * len(noise), [1.0] * len(noise)

        def note(sweeps: int, residual: Tensor) -> None:
            for i, value in enumerate(residual.tolist()):
                if value != latest[i]:  # those that are done stay as they were
                    taken[i], latest[i] = sweeps if most_sweeps is None else min(sweeps, most_sweeps), value
            if most_sweeps is not None and sweeps >= most_sweeps:
                raise _EnoughError

        with contextlib.suppress(_EnoughError):
            if self.apply(state, noise, callback=note).info.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt  # half as many sweeps are another map
        first = {sweeps: taken.index(sweeps) for sweeps in taken}
        return [
            Leader(noise[i : i + 1].clone(), sweeps, taken.count(sweeps) / len(taken)) for sweeps, i in first.items()
        ]


def check_tolerance(rtol: float, atol: float) -> None:
    """Refuse tolerances that can never be met or never be missed."""
    if not (0.0 <= rtol < 1.0 and 0.0 <= atol < float("inf")) or rtol == atol == 0.0:
        msg = f"The tolerance needs 0 <= rtol < 1 and atol >= 0, not both zero; got rtol={rtol}, atol={atol}."
        raise SettingsError(msg)


def check_cutoff(cutoff: float | None) -> None:
    """Refuse a cut that keeps nothing, or less than nothing."""
    if cutoff is not None and not 0.0 <= cutoff < 1.0:
        msg = f"cutoff is relative to the largest eigenvalue: it needs 0 <= cutoff < 1, not {cutoff}."
        raise SettingsError(msg)


def check_sweeps(max_sweeps: int) -> None:
    """Refuse to try for no time at all."""
    if max_sweeps < 1:
        msg = f"max_sweeps must be at least 1, not {max_sweeps}."
        raise SettingsError(msg)


def check_noise(rows: Rows, noise: Tensor) -> Tensor:
    """Return the noise in the rows' precision, or say why it cannot be projected."""
    if noise.ndim != 2 or noise.shape[1] != rows.n_columns or len(noise) == 0:
        msg = f"noise must have shape (samples, {rows.n_columns}), not {tuple(noise.shape)}."
        raise SettingsError(msg)
    if not torch.isfinite(noise).all():
        msg = "noise holds NaN or Inf."
        raise SettingsError(msg)
    return noise.to(rows.device, rows.dtype)


def relative(norms: Tensor, reference: Tensor) -> Tensor:
    """Return ``norms / reference``, and 0 where there was nothing to remove."""
    return torch.where(reference > 0, norms / reference.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def targets(projector: Projector, rows: Rows, noise: Tensor, before: Tensor, typical: float = 0.0) -> Tensor:  # (S,)
    """Return what ``|A v|`` has to come down to: the one stopping sentence.

    Noise that the rows hardly see has nothing to be removed: where ``|A noise|`` is within the rounding of the product,
    that rounding is the target. ``typical`` is the Frobenius norm of the rows, for a method that meets the tolerance in
    the mean over noise: it then stands in where ``|A noise|`` is smaller.
    """
    lengths = torch.stack([vector.double().norm() for vector in noise])
    target = torch.clamp(projector.rtol * _references(rows, noise, before, typical), min=projector.atol)
    rounding = 4.0 * torch.finfo(rows.dtype).eps * rows.frobenius() * lengths
    target = torch.where(before <= rounding, torch.maximum(target, rounding), target)
    if not torch.isfinite(target).all():  # to which nothing would compare as larger
        raise NullBayesError(_NOT_FINITE)
    return target


def _references(rows: Rows, noise: Tensor, before: Tensor, typical: float) -> Tensor:  # (S,)
    """Return what ``|A v|`` is compared with: ``|A noise|``, or what isotropic noise as long as this one would have."""
    if typical == 0.0:
        return before
    lengths = torch.stack([vector.double().norm() for vector in noise])
    return torch.where(before > 0, torch.maximum(before, typical * lengths / rows.n_columns**0.5), before)


def conclude(
    projector: Projector,
    rows: Rows,
    noise: Tensor,
    directions: Tensor,
    *,
    sweeps: int,
    failure: Outcome,
    rank: int | None = None,
    precision: torch.dtype,
    cutoff: float | None = None,
    norms: Sequence[Tensor] | None = None,
    typical: float = 0.0,
    callback: Callback | None = None,
) -> Projection:
    """Measure the residual, judge it by the one stopping sentence, warn where it fails, and pack the result.

    ``norms`` are ``|A v|`` and ``|A noise|`` where they were just recomputed anyway, if the rows are no approximation;
    ``typical`` as in :func:`targets`; ``callback`` for a method that has not called it yet.
    """
    if norms is None or rows.reference is not rows:
        norms = rows.reference.norms(torch.cat([directions, noise])).split(len(noise))
    after, before = norms
    if not (torch.isfinite(directions).all() and torch.isfinite(after).all()):
        raise NullBayesError(_NOT_FINITE)
    converged = after <= targets(projector, rows, noise, before, typical)
    if failure is Outcome.CONVERGED:  # on rows that approximate those it was judged by
        failure = Outcome.ROUNDED
    residual = relative(after, _references(rows, noise, before, typical))
    if failure is Outcome.TRUNCATED and float(residual.max()) <= _DIGITS * _eps(rows.dtype):
        failure = Outcome.PRECISION
    name = type(projector).__name__
    if rank is not None:
        dimension, stderr = float(rows.n_columns - rank), 0.0
    else:
        dimension, stderr = mean_and_error(traces(noise, directions), rows.n_columns)
    info = Info(
        projector=name,
        outcome=Outcome.CONVERGED if bool(converged.all()) else failure,
        residual=residual,
        converged=converged,
        sweeps=sweeps,
        rank=rank,
        kernel_dimension=dimension,
        kernel_dimension_stderr=stderr,
        precision=str(precision).removeprefix("torch."),
        cutoff=cutoff,
    )
    if callback is not None:
        callback(sweeps, info.residual)
    if info.outcome is not Outcome.CONVERGED:
        worst = float(info.residual.max())
        message = (
            f"{name}: {int((~converged).sum())} of {len(noise)} samples did not reach the tolerance "
            f"(largest residual {worst:.2g}, tolerance {projector.rtol:.2g}, {sweeps} sweeps): {failure.value}."
        )
        warn(message, ConvergenceWarning)
    return Projection(directions, info)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def traces(noise: Tensor, directions: Tensor) -> Tensor:  # (S, P), (S, P) -> (S,)
    r"""Estimate the trace of the map :math:`T` from noise to directions, once for each sample.

    For isotropic noise :math:`\varepsilon^\top T \varepsilon / \|\varepsilon\|^2` has mean
    :math:`\operatorname{tr} T / P`: unlike Hutchinson's estimate it never exceeds :math:`P`, and it varies less.
    """

    def one(noise: Tensor, direction: Tensor) -> Tensor:  # one sample at a time is widened
        noise, direction = noise.double(), direction.double()
        length = noise.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
        return len(noise) * (noise * direction).sum() / length

    return torch.stack([one(*pair) for pair in zip(noise, directions, strict=True)])


def mean_and_error(estimates: Tensor, size: int) -> tuple[float, float]:  # (S,)
    """Return the mean of estimates of a trace, of a matrix of that size, and its standard error.

    The spread that a projector of that rank has stands in when there is but one.
    """
    mean = float(estimates.mean().clamp_min(0.0))
    expected = max(0.0, 2.0 * mean * (1.0 - mean / size)) ** 0.5
    spread = float(estimates.std()) if len(estimates) > 1 else expected
    return mean, spread / len(estimates) ** 0.5
