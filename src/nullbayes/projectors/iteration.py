"""The loop that all iterative projectors share: sweep, measure, let the samples that are done go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.projectors.base import Callback, Outcome, Projector, Store, relative, targets

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
    store: Store | None = None,
) -> tuple[Tensor, Tensor, int, Outcome]:
    """Step until each sample meets the stopping sentence; return directions, ``|A v|``, sweeps and why it ended.

    The residual is recomputed from the rows after steps 1 to 5, then after every fifth more than before, so that
    measuring costs little. The schedule is fixed and samples never mix: a sample's result does not depend on the
    others.

    Ctrl-C ends the loop after the last finished step, whose residual is measured; a second one goes through. For that
    a step must return new tensors and leave those it was given as they are. Whatever is stored, after a step or when
    interrupted, leads to the same result, bit by bit: a measurement that was broken off is made again.
    """
    directions = carry[0].clone()
    target = targets(projector, rows, carry[0], reference)
    if rows.reference is not rows:
        target = _MARGIN * target
    norms = reference.clone()
    best, reached = reference.clone(), torch.zeros_like(reference, dtype=torch.int64)
    active = (norms > target).nonzero()[:, 0]
    carry = tuple(part[active] for part in carry)
    k, next_check, last, outcome = 0, 1, max_sweeps // sweeps_per_step, Outcome.CONVERGED

    def state() -> dict[str, Tensor]:
        counts = torch.tensor([k, next_check, outcome is Outcome.STAGNATED], dtype=torch.int64, device="cpu")
        return {
            "reference": reference, "directions": directions, "norms": norms, "best": best, "reached": reached,
            "active": active, "counts": counts, **{f"carry.{i}": part for i, part in enumerate(carry)},
        }  # fmt: skip

    if store is not None:
        stored = store.load(state())
        directions, norms, best, reached, active = (
            stored[name] for name in ("directions", "norms", "best", "reached", "active")
        )
        carry = tuple(stored[f"carry.{i}"] for i in range(len(carry)))
        k, next_check, stagnated = stored["counts"].tolist()
        outcome = Outcome.STAGNATED if stagnated else Outcome.CONVERGED
    try:
        while len(active):
            if k < next_check:  # else the measurement after step k is still to be made
                if k == last:
                    outcome = Outcome.MAX_SWEEPS
                    break
                carry, k = step(carry, k + 1), k + 1  # together, so that no Ctrl-C falls between them
            if k == next_check:
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
                following = max(k + 1, min(k + max(1, k // 5), last))
                active, carry, next_check = active[going], tuple(part[going] for part in carry), following
            if store is not None and len(active):
                store.save(state())
    except KeyboardInterrupt:
        if store is not None:
            store.save(state(), interrupted=True)
        outcome = Outcome.INTERRUPTED
        if len(active):
            directions[active] = carry[0]
            norms[active] = rows.norms(carry[0])
    return directions, norms, k * sweeps_per_step, outcome
