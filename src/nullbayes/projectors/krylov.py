r"""Krylov: conjugate gradients on the sum of the block steps.

The sum :math:`G = \sum_b T_b` of what the steps of all blocks take away is symmetric, positive semi-definite, and
vanishes exactly on the common kernel (the parallel form of alternating projections: Cimmino 1938, Gordon and Gordon
2010). Solving :math:`G x = G \varepsilon` from :math:`x = 0` stays in the row space, so that
:math:`v = \varepsilon - x` tends to the projection; the residual of the system is :math:`G v`. Measured against the
symmetric product of a forward and a backward sweep (Björck and Elfving 1979), a step costs half as much and somewhat
more are needed: on rows of image networks the sum wins by a tenth to a quarter, and its blocks can be worked on in any
order, or at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nullbayes.linalg.rows import Rows
from nullbayes.projectors.alternating import Alternating, SweepState
from nullbayes.projectors.base import (
    Callback,
    Iterative,
    Projection,
    Store,
    check_noise,
    check_sweeps,
    check_tolerance,
    conclude,
)
from nullbayes.projectors.iteration import Carry, iterate

# The recurred gradient collects rounding in the kernel, which no later step removes. It is replaced by the true one,
# which has none, before that can exceed a thousandfold eps of it, and every so often because it drifts in float32.
_RENEW_BELOW = 1e-3
_RENEW_EVERY = 20
# A single block is taken as it is first: where that suffices it leaves more of what the rows hardly see than the best
# combination of steps, which reaches into the kernel of many rows as far as it can.
_PLAIN_STEPS = 2


@dataclass(frozen=True)
class Krylov(Iterative):
    """Accelerate alternating projections by conjugate gradients.

    Cost: that of ``Alternating`` to prepare; a step is one sweep, and far fewer are needed; three more vectors a
    sample. With a single block it is the direct method with refinement.

    Parameters
    ----------
    alternating : Alternating
        Whose blocks, factors and coarse space to use; its own tolerance and limit are not used.
    rtol, atol, max_sweeps
        The stopping sentence, and how long to try.
    """

    alternating: Alternating = field(default_factory=Alternating)
    rtol: float = 1e-2
    atol: float = 0.0
    max_sweeps: int = 500

    def __post_init__(self) -> None:
        check_tolerance(self.rtol, self.atol)
        check_sweeps(self.max_sweeps)

    def prepare(self, rows: Rows) -> SweepState:
        """Cut the rows into blocks and factor the Gram matrix of each."""
        return self.alternating.prepare_for(rows, self.rtol)

    def apply(
        self, state: SweepState, noise: Tensor, *, callback: Callback | None = None, store: Store | None = None
    ) -> Projection:
        """Project each row of ``noise`` (S, P)."""
        rows = state.rows
        noise = check_noise(rows, noise)
        before = rows.norms(noise)
        gap = state.all_at_once
        plain = _PLAIN_STEPS if len(state.steps) == 1 else 0

        def step(carry: Carry, k: int) -> Carry:
            v, search, gradient, mark = carry
            if k <= plain:
                v = v - gradient
                gradient = gap(v)
                return v, gradient, gradient, gradient.square().sum(1)
            image, energy = gap(search), gradient.square().sum(1)
            curvature = (search * image).sum(1)
            # once the gradient is all rounding, a step would feed the kernel itself: stand still instead, or take the
            # plain step of a single block, which is never longer than what it is taken from
            useful = (curvature > 0) & (energy > floor * v.square().sum(1))
            length = torch.where(useful, (search * gradient).sum(1) / curvature.clamp_min(tiny), 0.0)[:, None]
            v = torch.addcmul(v, length, search, value=-1.0)
            gradient = torch.addcmul(gradient, length, image, value=-1.0)
            del image
            renew = (gradient.square().sum(1) < _RENEW_BELOW**2 * mark) | (k % _RENEW_EVERY == 0)
            if plain:
                v, renew = torch.where(useful[:, None], v, v - gradient), renew | ~useful
            if bool(renew.any()):
                gradient = torch.where(renew[:, None], gap(v), gradient)
                mark = torch.where(renew, gradient.square().sum(1), mark)
            turn = torch.where(useful, gradient.square().sum(1) / energy.clamp_min(tiny), 0.0)[:, None]
            return v, torch.addcmul(gradient, turn, search), gradient, mark

        tiny = torch.finfo(rows.dtype).tiny
        floor = max(torch.finfo(rows.dtype).eps, *(4.0 * step.leak for step in state.steps)) ** 2
        gradient = gap(noise)
        directions, after, sweeps, outcome = iterate(
            self, rows, (noise, gradient, gradient, gradient.square().sum(1)), before, step,
            sweeps_per_step=1, max_sweeps=self.max_sweeps, callback=callback, store=store,
        )  # fmt: skip
        return conclude(
            self, rows, noise, directions, sweeps=sweeps, failure=outcome,
            precision=state.precision, norms=(after, before),
        )  # fmt: skip
