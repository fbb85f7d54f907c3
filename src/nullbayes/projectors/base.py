r"""The contract of projectors: ``prepare`` once, ``apply`` many times, and report how it went."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from nullbayes.linalg.rows import Rows
from nullbayes.precision import full_precision

Callback = Callable[[int, Tensor], None]  # (sweeps so far, relative residual of each sample)


class Store(Protocol):
    """Where an iteration leaves its state, as named tensors, so that another one can continue from it."""

    def load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state to begin with: one that was saved for the same problem, or else the one given."""

    def save(self, state: Mapping[str, Tensor], *, interrupted: bool = False) -> None:
        """Save the state after a step, or skip it to save time; the state of an interruption is always saved."""


class Outcome(Enum):
    """How a projection ended; the value says what to do about it.

    Examples
    --------
    >>> Outcome.CONVERGED.value
    'every sample reached the tolerance'
    """

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
    IN_THE_MEAN = (
        "the tolerance is met in the mean over noise, and these samples are above it by chance: use them as they are, "
        "or fit with a somewhat smaller tolerance"
    )
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
        ``|A v| / |A noise|`` for each sample, recomputed from the rows; 0 where ``A noise`` is 0. A truncated direct
        method meets the tolerance in the mean over noise: where ``|A noise|`` of a sample is below that mean, for noise
        of the same length, the mean takes its place. A converged sample is within the tolerance.
    converged : Tensor (S,)
        Whether each sample meets the stopping rule.
    sweeps : int
        Passes over all blocks.
    sweeps_per_sample : Tensor (S,)
        The passes after which each sample was finished.
    rank : int or None
        Of the rows, where the method decides one.
    traces : Tensor (S,)
        One estimate per sample of the trace of the map from noise to directions, from ``noise · v``.
    kernel_dimension, kernel_dimension_stderr : float
        That trace, with its standard error: known from the rank, or else the mean of the estimates.
    precision : str
        In which the factors were computed.
    cutoff : float or None
        Eigenvalues below this part of the largest one counted as zero.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.ExactDual()
    >>> info = projector.apply(projector.prepare(nb.DenseRows(torch.eye(2, 5))), torch.ones(1, 5)).info
    >>> info.outcome.name, info.rank, info.kernel_dimension
    ('CONVERGED', 2, 3.0)
    """

    projector: str
    outcome: Outcome
    residual: Tensor
    converged: Tensor
    sweeps: int
    sweeps_per_sample: Tensor
    rank: int | None
    traces: Tensor
    kernel_dimension: float
    kernel_dimension_stderr: float
    precision: str
    cutoff: float | None = None


@dataclass(frozen=True)
class Projection:
    """Directions in the null space, up to what ``info`` says.

    Attributes
    ----------
    directions : Tensor (S, P)
        The projected noise, one direction per sample.
    info : Info
        Residuals, rank and outcome.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> rows, projector = nb.DenseRows(torch.tensor([[1.0, 1.0]])), nb.projectors.ExactDual()
    >>> projection = projector.apply(projector.prepare(rows), torch.tensor([[2.0, 0.0]]))
    >>> projection.directions, projection.info.residual
    (tensor([[ 1., -1.]]), tensor([0.], dtype=torch.float64))
    """

    directions: Tensor
    info: Info


class Projector(ABC):
    r"""A way to compute :math:`v = (I - A^+ A) \varepsilon`.

    A subclass is a frozen dataclass with ``rtol`` and ``atol`` among its fields. It implements ``_prepare(rows)``,
    which returns a state, and ``_apply(state, noise, callback, store)``; both run in full precision.

    Attributes
    ----------
    rtol, atol : float
        The tolerance that the result is judged by, relative to ``|A noise|`` and absolute.

    Examples
    --------
    A projector that solves a least-squares problem for all samples at once:

    >>> import torch
    >>> import nullbayes as nb
    >>> from nullbayes.projectors import Attempt, Outcome, Projector, check_noise, finish_projection
    >>> class LeastSquares(Projector):
    ...     rtol, atol = 1e-4, 0.0
    ...
    ...     def _prepare(self, rows):
    ...         return rows
    ...
    ...     def _apply(self, rows, noise, callback, store):
    ...         noise = check_noise(rows, noise)
    ...         removed = torch.linalg.lstsq(rows.dense(), rows.mv(noise).T).solution.T
    ...         attempt = Attempt(noise - removed, sweeps=1, failure=Outcome.PRECISION, precision=rows.dtype)
    ...         return finish_projection(self, rows, noise, attempt, callback)
    >>> projector = LeastSquares()
    >>> projector.apply(projector.prepare(nb.DenseRows(torch.eye(2, 3))), torch.ones(1, 3)).directions
    tensor([[0., 0., 1.]])
    """

    rtol: float
    atol: float
    adapts = False  # whether the map from noise to directions depends on the noise

    @abstractmethod
    def _prepare(self, rows: Rows) -> Any:
        """Return the state."""

    @abstractmethod
    def _apply(self, state: Any, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        """Project each row of ``noise`` (S, P)."""

    def prepare(self, rows: Rows) -> Any:
        """Do the work that needs no noise.

        Parameters
        ----------
        rows : Rows
            The matrix whose null space is projected on.

        Returns
        -------
        Any
            The state for any number of calls of :meth:`apply`.
        """
        with full_precision():
            return self._prepare(rows)

    def apply(
        self, state: Any, noise: Tensor, *, callback: Callback | None = None, store: Store | None = None
    ) -> Projection:
        """Project each row of the noise.

        Parameters
        ----------
        state
            What :meth:`prepare` returned.
        noise : Tensor (S, P)
            The vectors to project.
        callback : callable (sweeps, residual (S,)) -> None, optional
            Called after every measurement of the residual; a method that guesses it in between tells its guesses.
        store : Store, optional
            Where an iterative method saves its state and continues from; others ignore it.

        Returns
        -------
        Projection
            The directions and how it went. A sample that missed the tolerance is also a ``ConvergenceWarning``.
        """
        with full_precision():
            return self._apply(state, noise, callback, store)

    def apply_transposed(self, state: Any, vectors: Tensor, sweeps: int) -> Tensor:  # (m, P) -> (m, P)
        r"""Return :math:`T^\top w` for each vector, where :math:`T` maps the noise of samples to their directions.

        A sample :math:`v = T \varepsilon` has :math:`\|T^\top w\|^2` as the variance of :math:`w^\top v`. The map of a
        direct method is symmetric and the same for all samples. An iterative one depends on the ``sweeps`` that the
        samples took. Where it depends on the noise as well, ``adapts`` is true, and the result is the part of each
        vector in the null space, to about the accuracy of the samples.
        """
        projection = self.apply(state, vectors)
        if projection.info.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt  # half a projection is another map
        return projection.directions

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
