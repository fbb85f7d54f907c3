r"""The stopping rule that all projectors share, and the account of a projection by it.

A sample has converged when the residual, recomputed from the rows, is small enough:

.. math:: \|A v\| \le \max(\text{atol}, \text{rtol} \cdot \|A \varepsilon\|).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.errors import ConvergenceWarning, NullBayesError, SettingsError, warn
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.base import Callback, Info, Outcome, Projection, Projector

_DIGITS = 100.0  # a residual below this multiple of eps is rounding
_NOT_FINITE = "The projection produced NaN or Inf: look for extreme values in the rows."


def check_tolerance(rtol: float, atol: float) -> None:
    """Refuse tolerances that can never be met or never be missed.

    Parameters
    ----------
    rtol, atol : float
        The settings of a projector: relative to ``|A noise|``, and absolute.

    Raises
    ------
    SettingsError
        Unless 0 <= rtol < 1 and atol >= 0, and one of them is positive.

    Examples
    --------
    >>> check_tolerance(1e-2, 0.0)
    >>> check_tolerance(2.0, 0.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nullbayes.errors.SettingsError: The tolerance needs 0 <= rtol < 1 and atol >= 0, not both zero; got rtol=2.0...
    """
    if not (0.0 <= rtol < 1.0 and 0.0 <= atol < float("inf")) or rtol == atol == 0.0:
        msg = f"The tolerance needs 0 <= rtol < 1 and atol >= 0, not both zero; got rtol={rtol}, atol={atol}."
        raise SettingsError(msg)


def check_cutoff(cutoff: float | None) -> None:
    """Refuse a cut that keeps nothing, or less than nothing."""
    if cutoff is not None and not 0.0 <= cutoff < 1.0:
        msg = f"cutoff is relative to the largest eigenvalue: it needs 0 <= cutoff < 1, not {cutoff}."
        raise SettingsError(msg)


def check_least(name: str, value: int, least: int) -> None:
    """Refuse a setting that is too small."""
    if value < least:
        msg = f"{name} must be at least {least}, not {value}."
        raise SettingsError(msg)


def check_noise(rows: Rows, noise: Tensor) -> Tensor:
    """Return the noise in the rows' precision and on their device, or say why it cannot be projected.

    Parameters
    ----------
    rows : Rows
        The matrix, with P columns.
    noise : Tensor (S, P)
        The vectors to project, at least one.

    Returns
    -------
    Tensor (S, P)
        The same numbers.

    Raises
    ------
    SettingsError
        If the shape is another, or the noise holds NaN or Inf.

    Examples
    --------
    >>> import nullbayes as nb
    >>> check_noise(nb.DenseRows(torch.eye(2, 3)), torch.ones(1, 3, dtype=torch.float64)).dtype
    torch.float32
    """
    if noise.ndim != 2 or noise.shape[1] != rows.n_columns or len(noise) == 0:
        msg = f"noise must have shape (samples, {rows.n_columns}), not {tuple(noise.shape)}."
        raise SettingsError(msg)
    if not torch.isfinite(noise).all():
        msg = "noise holds NaN or Inf."
        raise SettingsError(msg)
    return noise.to(rows.device, rows.dtype)


def relative_residual(norms: Tensor, reference: Tensor) -> Tensor:
    """Return ``norms / reference``, and 0 where there was nothing to remove."""
    return torch.where(reference > 0, norms / reference.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def residual_targets(
    projector: Projector, rows: Rows, noise: Tensor, before: Tensor, frobenius: float = 0.0
) -> Tensor:  # (S,)
    """Return what ``|A v|`` has to come down to, by the stopping rule.

    Noise that the rows hardly see has nothing to be removed: where ``|A noise|`` is within the rounding of the product,
    that rounding is the target. ``frobenius`` is the Frobenius norm of the rows, for a method that meets the tolerance
    in the mean over noise: it then replaces ``|A noise|`` where that is smaller.
    """
    target = torch.clamp(projector.rtol * _references(rows, noise, before, frobenius), min=projector.atol)
    rounding = 4.0 * torch.finfo(rows.dtype).eps * rows.frobenius() * rows.vector_lengths(noise)
    target = torch.where(before <= rounding, torch.maximum(target, rounding), target)
    if not torch.isfinite(target).all():  # nothing would compare as larger than NaN
        raise NullBayesError(_NOT_FINITE)
    return target


def _references(rows: Rows, noise: Tensor, before: Tensor, frobenius: float) -> Tensor:  # (S,)
    """Return what ``|A v|`` is compared with: ``|A noise|``, or its mean over isotropic noise of the same length."""
    if frobenius == 0.0:
        return before
    expected = frobenius * rows.vector_lengths(noise) / rows.n_all_columns**0.5
    return torch.where(before > 0, torch.maximum(before, expected), before)


@dataclass(frozen=True)
class Attempt:
    """What a method has computed, to be judged by :func:`finish_projection`.

    Attributes
    ----------
    directions : Tensor (S, P)
        The projected noise.
    sweeps : Tensor (S,) or int
        Passes over the rows, per sample or the same for all.
    failure : Outcome
        Why a sample may have missed the tolerance.
    precision : torch.dtype
        The precision of the factors.
    rank : int, optional
        The rank of the rows, if the method decides one.
    cutoff : float, optional
        Eigenvalues below this part of the largest one counted as zero.
    norms : pair of Tensor (S,), optional
        ``|A v|`` and ``|A noise|``, if they were measured already and the callback was told.
    frobenius : float
        The Frobenius norm of the rows, for a method that meets the tolerance in the mean over noise; else 0.

    Examples
    --------
    >>> Attempt(torch.zeros(1, 3), sweeps=1, failure=Outcome.TRUNCATED, precision=torch.float64).rank is None
    True
    """

    directions: Tensor
    sweeps: Tensor | int
    failure: Outcome
    precision: torch.dtype
    rank: int | None = None
    cutoff: float | None = None
    norms: tuple[Tensor, Tensor] | None = None
    frobenius: float = 0.0


def finish_projection(
    projector: Projector, rows: Rows, noise: Tensor, attempt: Attempt, callback: Callback | None = None
) -> Projection:
    """Measure the residual, judge it by the stopping rule, warn where it fails, and return the result.

    The cost is one product of the rows with all directions and all noise, unless the attempt has their norms.

    Parameters
    ----------
    projector : Projector
        Its ``rtol`` and ``atol`` are the tolerance, and the name of its class is in the report.
    rows : Rows
        The matrix whose null space was projected on.
    noise : Tensor (S, P)
        What was projected, from :func:`check_noise`.
    attempt : Attempt
        What came of it.
    callback : callable (sweeps, residual (S,)) -> None, optional
        Told of the residual.

    Returns
    -------
    Projection
        The directions and how it went. A sample that missed the tolerance is also a ``ConvergenceWarning``.

    Raises
    ------
    NullBayesError
        If the directions hold NaN or Inf.

    Examples
    --------
    >>> import nullbayes as nb
    >>> rows, noise = nb.DenseRows(torch.eye(2, 3)), torch.ones(1, 3)
    >>> found = torch.tensor([[0.001, 0.0, 1.0]])
    >>> attempt = Attempt(found, sweeps=1, failure=Outcome.MAX_SWEEPS, precision=torch.float32)
    >>> finish_projection(nb.projectors.Krylov(rtol=0.01), rows, noise, attempt).info.residual
    tensor([0.0007], dtype=torch.float64)
    """
    directions, failure, norms = attempt.directions, attempt.failure, attempt.norms
    if norms is None or rows.reference is not rows:
        after, before = rows.reference.norms(torch.cat([directions, noise])).split(len(noise))
    else:
        after, before = norms
    if not (torch.isfinite(directions).all() and torch.isfinite(after).all()):
        raise NullBayesError(_NOT_FINITE)
    converged = after <= residual_targets(projector, rows, noise, before, attempt.frobenius)
    residual = relative_residual(after, _references(rows, noise, before, attempt.frobenius))
    if failure is Outcome.CONVERGED:  # on rows in half precision, while the residual is that of the full rows
        failure = Outcome.ROUNDED
    if failure is Outcome.TRUNCATED and float(residual.max()) <= _DIGITS * torch.finfo(rows.dtype).eps:
        failure = Outcome.PRECISION
    elif failure is Outcome.TRUNCATED and attempt.frobenius:
        failure = Outcome.IN_THE_MEAN
    taken = attempt.sweeps
    sweeps = taken if isinstance(taken, Tensor) else torch.full_like(after, taken, dtype=torch.int64)
    estimates = traces(rows, noise, directions)
    dimension, stderr = mean_and_error(estimates, rows.n_all_columns)
    if attempt.rank is not None:
        dimension, stderr = float(rows.n_all_columns - attempt.rank), 0.0
    info = Info(
        projector=type(projector).__name__,
        outcome=Outcome.CONVERGED if bool(converged.all()) else failure,
        residual=residual,
        converged=converged,
        sweeps=int(sweeps.max()),
        sweeps_per_sample=sweeps,
        rank=attempt.rank,
        traces=estimates,
        kernel_dimension=dimension,
        kernel_dimension_stderr=stderr,
        precision=str(attempt.precision).removeprefix("torch."),
        cutoff=attempt.cutoff,
    )
    if callback is not None and norms is None:
        callback(info.sweeps, info.residual)
    if info.outcome is not Outcome.CONVERGED:
        message = (
            f"{info.projector}: {int((~converged).sum())} of {len(noise)} samples did not reach the tolerance (largest "
            f"residual {float(residual.max()):.2g}, tolerance {projector.rtol:.2g}, {info.sweeps} sweeps): "
            f"{failure.value}."
        )
        warn(message, ConvergenceWarning)
    return Projection(directions, info)


def traces(rows: Rows, noise: Tensor, directions: Tensor) -> Tensor:  # (S, P), (S, P) -> (S,)
    r"""Estimate the trace of the map :math:`T` from noise to directions, once for each sample.

    For isotropic noise :math:`\varepsilon^\top T \varepsilon / \|\varepsilon\|^2` has mean
    :math:`\operatorname{tr} T / P`: unlike Hutchinson's estimate it never exceeds :math:`P`, and it varies less.
    """

    def one(noise: Tensor, direction: Tensor) -> Tensor:  # one sample at a time is widened
        noise, direction = noise.double(), direction.double()
        return torch.stack([(noise * direction).sum(), noise.square().sum()])

    sums = rows.total_columns(torch.stack([one(*pair) for pair in zip(noise, directions, strict=True)]))
    return rows.n_all_columns * sums[:, 0] / sums[:, 1].clamp_min(torch.finfo(torch.float64).tiny)


def mean_and_error(estimates: Tensor, size: int) -> tuple[float, float]:  # (S,)
    """Return the mean of estimates of the trace of a matrix of that size, and its standard error.

    With a single estimate, the theoretical standard deviation for a projector is used.
    """
    mean = float(estimates.mean().clamp_min(0.0))
    expected = max(0.0, 2.0 * mean * (1.0 - mean / size)) ** 0.5
    spread = float(estimates.std()) if len(estimates) > 1 else expected
    return mean, spread / len(estimates) ** 0.5
