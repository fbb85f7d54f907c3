"""The loop that all iterative projectors share: sweep, measure, let the samples that are done go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.projectors.base import Callback, Outcome, Projector, relative, targets

if TYPE_CHECKING:
    from nullbayes.linalg.rows import Rows

Carry = tuple[Tensor, ...]  # each (S, ...); the first is the iterate v

_MARGIN = 0.9  # what to aim for on rows that approximate others, on which the result is judged
_PATIENCE = 50  # steps, beyond as many as led to the last gain, before a sample counts as stagnated


def iterate(
    projector: Projector,
    rows: Rows,
    carry: Carry,
    reference: Tensor,  # (S,) |A noise|
    step: Callable[[Carry, int], Carry],
    *,
    sweeps_per_step: int,
    max_sweeps: int,
    callback: Callback | None,
) -> tuple[Tensor, Tensor, int, Outcome]:
    """Step until each sample meets the stopping sentence; return directions, ``|A v|``, sweeps and why it ended.

    The residual is recomputed from the rows after steps 1 to 5, then after every fifth more than before, so that
    measuring costs little. The schedule is fixed and samples never mix: a sample's result does not depend on the
    others.

    Ctrl-C ends the loop after the last finished step, whose residual is measured; a second one goes through. For that
    a step must return new tensors and leave those it was given as they are.
    """
    directions = carry[0].clone()
    target = targets(projector, rows, carry[0], reference)
    if rows.reference is not rows:
        target = _MARGIN * target
    norms = reference.clone()
    best, reached = reference.clone(), torch.zeros_like(reference, dtype=torch.int64)
    active = (norms > target).nonzero()[:, 0]
    carry = tuple(part[active] for part in carry)
    k, next_check, outcome = 0, 1, Outcome.CONVERGED
    try:
        while len(active):
            if (k + 1) * sweeps_per_step > max_sweeps:
                outcome = Outcome.MAX_SWEEPS
                break
            carry, k = step(carry, k + 1), k + 1  # together, so that no Ctrl-C falls between them
            last = (k + 1) * sweeps_per_step > max_sweeps
            if k < next_check and not last:
                continue
            next_check = k + max(1, k // 5)
            directions[active] = carry[0]
            now = rows.norms(carry[0])
            if not torch.isfinite(now).all():
                msg = f"NaN or Inf appeared in sweep {k * sweeps_per_step}: look for extreme values in the rows."
                raise NullBayesError(msg)
            norms[active] = now
            gained = now < 0.999 * best[active]  # small gains add up: they are compared with the last noted one
            reached[active] = torch.where(gained, k, reached[active])
            best[active] = torch.where(gained, now, best[active])
            if callback is not None:
                callback(k * sweeps_per_step, relative(norms, reference))
            stuck = (now > target[active]) & (k > 2 * reached[active] + _PATIENCE)
            if bool(stuck.any()):
                outcome = Outcome.STAGNATED
            going = (now > target[active]) & ~stuck
            active, carry = active[going], tuple(part[going] for part in carry)
    except KeyboardInterrupt:
        outcome = Outcome.INTERRUPTED
        if len(active):
            directions[active] = carry[0]
            norms[active] = rows.norms(carry[0])
    return directions, norms, k * sweeps_per_step, outcome
