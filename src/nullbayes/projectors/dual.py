r"""ExactDual: :math:`v = \varepsilon - A^\top (A A^\top)^+ A \varepsilon`, by the Gram matrix of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import GramFactor, factor_exact, factor_truncated, relative_cutoff
from nullbayes.projectors.base import BLOCKS_INSTEAD, Callback, Outcome, Projection, Projector, Store
from nullbayes.projectors.stopping import Attempt, check_cutoff, check_noise, check_tolerance, finish_projection


@dataclass(frozen=True)
class DualState:
    """The rows and the factor of their Gram matrix."""

    rows: Rows
    factor: GramFactor
    cutoff: float
    frobenius: float = 0.0  # Frobenius norm of the rows, where the tolerance holds in the mean over noise


@dataclass(frozen=True)
class ExactDual(Projector):
    r"""Project by factoring the Gram matrix of all R rows, in float64.

    Cost: :math:`R^2 P` operations for the matrix (half of it by symmetry), :math:`R^3/3` to factor, :math:`4RP` per
    sample; memory :math:`8 R^2` bytes, twice that where an eigendecomposition is needed. Wins whenever the Gram matrix
    is affordable. Singular values below :math:`\sqrt{R\,\mathrm{eps}}` of the largest, after scaling the rows to unit
    length, count as zero.

    Parameters
    ----------
    truncate : bool
        Remove no more directions, leading ones first, than it takes to reach ``rtol`` in the mean. What remains is
        larger than the null space: it includes directions that change the training outputs by less than the tolerance.
        They are most of what varies between and beyond the data when the spectrum has no gap. Costs eigenvectors
        instead of a Cholesky factor.
    cutoff : float, optional
        Relative eigenvalue cut of the (equilibrated) Gram matrix; default ``R * eps``.
    rtol, atol : float
        The tolerance that the result is judged by, relative to ``|A noise|`` and absolute.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.ExactDual()
    >>> state = projector.prepare(nb.DenseRows(torch.eye(2, 3)))
    >>> projector.apply(state, torch.ones(1, 3)).directions
    tensor([[0., 0., 1.]])
    """

    truncate: bool = False
    cutoff: float | None = None
    rtol: float = 1e-4
    atol: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_cutoff(self.cutoff)

    @property
    def memory_advice(self) -> str:
        """Advise a method that needs no matrix of all rows."""
        return BLOCKS_INSTEAD

    def _prepare(self, rows: Rows) -> DualState:
        cutoff = relative_cutoff(rows.n_rows, rows.dtype) if self.cutoff is None else self.cutoff

        def form() -> Tensor:
            return rows.block(0, rows.n_rows).gram(torch.float64)

        if not self.truncate:
            return DualState(rows, factor_exact(form, cutoff), cutoff)
        gram = form()
        frobenius = float(gram.trace().sqrt())
        return DualState(rows, factor_truncated(gram, self.rtol, cutoff, rows.spared(self.rtol)), cutoff, frobenius)

    def _apply(self, state: DualState, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        rows = state.rows
        noise = check_noise(rows, noise)
        directions = noise
        for _ in range(2):  # the second pass removes what rounding left of the first
            directions = directions - rows.rmv(state.factor.solve(rows.mv(directions)))
        attempt = Attempt(
            directions,
            sweeps=2,
            failure=Outcome.TRUNCATED if self.truncate else Outcome.STAGNATED,
            precision=torch.float64,
            rank=state.factor.rank,
            cutoff=state.cutoff,
            frobenius=state.frobenius,
        )
        return finish_projection(self, rows, noise, attempt, callback)
