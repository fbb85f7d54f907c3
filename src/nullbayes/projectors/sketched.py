r"""Sketched: conjugate gradients on all rows, preconditioned by a factor that is computed from a part of them.

With :math:`\tilde A` the rows scaled to unit length, conjugate gradients on
:math:`\tilde A^\top \tilde A x = \tilde A^\top \tilde A \varepsilon` minimize :math:`\|\tilde A (\varepsilon - x)\|`
over their Krylov space, which is the residual itself. The preconditioner is :math:`M = B^\top B + \delta`, where
:math:`B = \Omega \tilde A` and :math:`B^\top B` is proportional to :math:`\tilde A^\top \tilde A` in expectation. If
:math:`B` has fewer rows than columns, its rows are random combinations of those of each example, and the factor of
their Gram matrix takes the cube of their share. Otherwise they are all rows of some examples, drawn at random, whose
normal matrix takes their share of the time. Both :math:`M^{-1}` and :math:`\tilde A^\top \tilde A` map the row space to
itself, so that no step touches the null space.

The first iterate is :math:`\delta M^{-1} \varepsilon`, the step of :math:`B` alone. It removes the directions in
which the rows are longest; without it, the first gradients would consist of these, and rounding in them would be as
large as the rest. It also makes the whole map symmetric: with :math:`H = \tilde A^\top \tilde A`, steps are polynomials
in :math:`M^{-1} H`, and :math:`q(M^{-1} H) M^{-1} = M^{-1} q(H M^{-1})`.

A step reads all rows once, for both products, so that rows which do not fit in memory are formed once per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.held import HeldBlock, HeldRows
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import NormalFactor, factor_normal, factor_shifted
from nullbayes.projectors.iteration import Carry, Iterative, Step
from nullbayes.projectors.stopping import check_least, check_tolerance
from nullbayes.projectors.sweep import DualStep, gram_precision

_SHIFT = 1.0  # δ over the tolerance: less saves a few sweeps, and removes more of what the rows hardly see
_LEAST_SHIFT = 1e-3  # δ at least: a part of the rows tells no more of the directions that they hardly see
_RENEW_EVERY = 20  # steps after which the recurred gradient is replaced by the true one, because it drifts
# over the tolerance: how much a row of unit length may change, where only a part of the examples is taken
_MOST_CHANGED = 15.0
_SEED = 0x736B65


@dataclass(frozen=True)
class SketchState:
    """The rows, the factors that scale them to unit length, and the preconditioner."""

    rows: Rows
    scale: Tensor  # (R,)
    part: DualStep | NormalFactor  # of B, whose remainder is δ M⁻¹

    @property
    def precision(self) -> torch.dtype:
        """In which the factor was computed."""
        return self.part.precision

    def normal(self, vectors: Tensor) -> tuple[Tensor, Tensor]:  # (S, P) -> (S, R), (S, P)
        """Multiply with Ã, and the result with the transpose of Ã, in one pass over the rows."""
        images, total = [], torch.zeros_like(vectors)
        for where, block in self.rows.blocks(self.rows.rows_per_pass):
            images.append(block.mv(vectors) * self.scale[where])
            total += block.rmv(images[-1] * self.scale[where])
        return torch.cat(images, dim=1), total

    def precondition(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Multiply with δ M⁻¹."""
        return self.part.remainder(vectors)


@dataclass(frozen=True)
class Sketched(Iterative):
    r"""Accelerate conjugate gradients on all rows by the factor of a part of them.

    Cost for m of R rows: :math:`m^2 P` operations for the Gram matrix of m combinations, :math:`m^3/3` for its factor,
    at most :math:`8RPS` per sweep of S samples, for products with the rows and with the combinations; memory
    :math:`m^2` numbers and the combinations in addition to the rows. It wins over ``Krylov`` where examples have
    several outputs and all rows in one block are too many to be factored. If m is at least P, the cost is
    :math:`m P^2` for the normal matrix of the rows of some examples, :math:`P^3/3` for its factor and :math:`4RPS` per
    sweep; it wins where rows are many times as many as parameters, and no plan chooses it yet. A sample then changes no
    row of unit length by more than 15 times ``rtol``, unless 16 sweeps do not suffice for that. Processes cannot share
    the rows. With rows in float32, rounding inside the null space is a few times ``eps / rtol``, relative to the noise.

    Parameters
    ----------
    share : float
        The part of the rows, above 0 and at most 1: 0.3 takes three random combinations of the ten rows of each
        example. An example has at least one: where it has a single row, all rows are factored, whatever the share. If
        combinations would be as many as the parameters, all rows of a share of the examples are taken instead.
    rtol, atol : float
        A sample is finished when ``|A v| <= max(atol, rtol * |A noise|)``, for its direction v and the rows A.
    max_sweeps : int
        The number of sweeps, passes over all rows, after which to give up: what there is comes back with a
        ``ConvergenceWarning``.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> projector = nb.projectors.Sketched(rtol=1e-3)
    >>> state = projector.prepare(nb.DenseRows(torch.eye(2, 3)))
    >>> projector.apply(state, torch.ones(1, 3)).directions.round(decimals=2)
    tensor([[0., 0., 1.]])
    """

    share: float = 0.3
    rtol: float = 1e-2
    atol: float = 0.0
    max_sweeps: int = 500

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_least("max_sweeps", self.max_sweeps, 1)
        if not 0.0 < self.share <= 1.0:
            msg = f"share must lie above 0 and be at most 1, such as 0.3, not {self.share}."
            raise SettingsError(msg)

    @property
    def memory_advice(self) -> str:
        """Advise a smaller sketch."""
        return "lower share or n_samples"

    def smaller(self, rows: Rows) -> Sketched | None:
        """Return the same with half of the combinations, or None where an example has a single one."""
        now, each = combinations(self.share, rows.rows_per_example), rows.rows_per_example
        if self._takes_examples(rows):
            now = min(now, 2 * (rows.n_columns - 1) // (rows.n_rows // each))  # a smaller matrix than that of columns
        return replace(self, share=now // 2 / each) if now > 1 else None

    def _takes_examples(self, rows: Rows) -> bool:
        """Return whether all rows of some examples are taken: combinations would be as many as the columns."""
        each = rows.rows_per_example
        return combinations(self.share, each) * (rows.n_rows // each) >= rows.n_columns

    def _prepare(self, rows: Rows) -> SketchState:
        if rows.row_group.size > 1:
            msg = "Sketched works in one process: use projector=nb.projectors.Krylov() for rows of several processes."
            raise SettingsError(msg)
        rows.check_whole("Sketched")
        scale = rows.unit_scale(self.rtol).to(rows.dtype)
        shift = max(_LEAST_SHIFT, _SHIFT * self.rtol)
        if self._takes_examples(rows):
            taken = draw_examples(self.share, rows.n_rows // rows.rows_per_example).to(rows.device)
            shift *= float(taken.double().mean())
            part = factor_normal(lambda: normal_matrix(rows, scale, taken), rows.dtype, shift)
            return SketchState(rows, scale, part)
        count = combinations(self.share, rows.rows_per_example)
        sketch = combine(rows, count, scale)
        precision = gram_precision(rows.dtype, rows.device, sketch.n_rows)
        shift *= count / rows.rows_per_example
        factor = factor_shifted(lambda: sketch.gram(precision), rows.dtype, shift)
        return SketchState(rows, scale, DualStep(lambda: sketch, factor))

    def _start(self, state: SketchState, noise: Tensor) -> Carry:
        first = state.precondition(noise)
        changes, gradient = state.normal(first)
        search = state.precondition(gradient)
        return first, search, changes, gradient, (gradient * search).sum(1)

    def _step(self, state: SketchState) -> Step:
        return _conjugate_gradients(state)

    def _guess(self, state: SketchState, carry: Carry) -> Tensor:
        """Return the length of the recurred changes, of rows with their own lengths.

        It is infinite for a sample that changes some row by much more than the tolerance, where only a part of the
        examples was taken: others may be unlike all of these, and too few to count in the residual.
        """
        lengths = torch.where(state.scale > 0, state.scale.reciprocal(), 0.0)
        found = torch.stack([(changes * lengths).double().square().sum() for changes in carry[2]]).sqrt()
        if isinstance(state.part, DualStep):
            return found
        return torch.where(carry[2].abs().amax(1) > _MOST_CHANGED * self.rtol, float("inf"), found)


def draw_examples(share: float, n_examples: int) -> Tensor:  # bool (n,)
    """Draw which examples are taken: at random, because data may be in an order."""
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    order = torch.randperm(n_examples, generator=generator, device="cpu")
    taken = torch.zeros(n_examples, dtype=torch.bool, device="cpu")
    taken[order[: math.ceil(share * n_examples - 1e-9)]] = True
    return taken


def combinations(share: float, rows_per_example: int) -> int:
    """Return how many combinations are taken of the rows of an example."""
    return max(1, math.ceil(share * rows_per_example - 1e-9))


def combine(rows: Rows, count: int, scale: Tensor) -> HeldBlock:  # (R,)
    """Combine the scaled rows of each example ``count`` times, with orthonormal weights, and hold the combinations."""
    each, generator = rows.rows_per_example, torch.Generator(device="cpu").manual_seed(_SEED)
    drawn = torch.randn(rows.n_rows // each, each, count, generator=generator, dtype=torch.float64, device="cpu")
    weights = torch.linalg.qr(drawn)[0].mT.to(rows.device, rows.dtype)
    pieces: list[Piece] = []
    for where, block in rows.blocks(rows.rows_per_pass):
        here = slice(where.start // each, where.stop // each)
        scaled = weights[here] * scale[where].view(-1, 1, each)
        part: list[Piece] = []
        for gradients, activations, column in block.factors():
            combined = scaled @ gradients.to(scaled.dtype)  # (n, count, q)
            if activations is None:
                part.append(DensePiece(combined.flatten(0, 1), column))
            else:
                part.append(OuterPiece(activations.to(scaled.dtype), combined, column, None))
        pieces = pieces or [piece.allocate(len(weights) * count, rows.device) for piece in part]
        for whole, piece in zip(pieces, part, strict=True):
            whole.take(slice(here.start * count, here.stop * count)).fill(piece)
    held = HeldRows(pieces, n_rows=len(weights) * count, n_columns=rows.n_columns, like=weights, rows_per_example=count)
    held.working_bytes = rows.working_bytes
    return held.block(0, held.n_rows)


def _conjugate_gradients(state: SketchState) -> Step:
    """Return a step of preconditioned conjugate gradients.

    The carry consists of the iterate v, the search direction, Ã v, the gradient Ã⊤Ã v, and the squared length of the
    gradient in the norm of δ M⁻¹.
    """
    tiny, floor = torch.finfo(state.rows.dtype).tiny, torch.finfo(state.rows.dtype).eps ** 2

    def dot(a: Tensor, b: Tensor) -> Tensor:  # (S, n), (S, n) -> (S,)
        return (a * b).sum(1)

    def step(carry: Carry, k: int) -> Carry:
        v, search, changes, gradient, energy = carry
        image, pulled = state.normal(search)
        curvature = dot(image, image)
        # once the changes are all rounding, a step would follow it: the iterate stays
        useful = (curvature > 0) & (dot(changes, changes) > floor * dot(v, v))
        length = torch.where(useful, dot(changes, image) / curvature.clamp_min(tiny), 0.0)[:, None]
        v = torch.addcmul(v, length, search, value=-1.0)
        if k % _RENEW_EVERY:
            changes = torch.addcmul(changes, length, image, value=-1.0)
            gradient = torch.addcmul(gradient, length, pulled, value=-1.0)
        else:
            changes, gradient = state.normal(v)
        del image, pulled  # the memory of a vector per sample
        preconditioned = state.precondition(gradient)
        after = dot(gradient, preconditioned)
        weight = torch.where(useful, after / energy.clamp_min(tiny), 0.0)[:, None]
        return v, torch.addcmul(preconditioned, weight, search), changes, gradient, after

    return step
