"""The loop that all iterative projectors share: sweep, measure the residual, and let finished samples go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.projectors.base import Callback, Outcome, Projection, Projector, Store
from nullbayes.projectors.stopping import Attempt, check_noise, finish_projection, relative_residual, residual_targets

Carry = tuple[Tensor, ...]  # each (S, ...); the first is the iterate v
Step = Callable[[Carry, int], Carry]  # the state before step k, counted from 1, and k -> the state after it

_MARGIN = 0.9  # part of the tolerance to reach on rows in half precision: the result is judged on the full rows
_PATIENCE = 50  # a sample has stagnated when step k brings no gain and k > 2 k₀ + 50, with k₀ the step of its last gain


class Iterative(Projector):
    """A projector that works step by step, so that it can stop after a step and continue later.

    A subclass says where to start (``_start``) and what a step is (``_step``). A step must return new tensors and leave
    those it was given as they are, and samples must not mix. The state of ``_prepare`` has ``rows`` and ``precision``.

    Attributes
    ----------
    max_sweeps : int
        The number of sweeps, passes over all rows, after which to give up.

    Examples
    --------
    Gradient descent on ``|A v|²``, which is slow but needs no factors:

    >>> from types import SimpleNamespace
    >>> import nullbayes as nb
    >>> class Descent(nb.projectors.Iterative):
    ...     rtol, atol, max_sweeps = 1e-2, 0.0, 100
    ...
    ...     def _prepare(self, rows):
    ...         return SimpleNamespace(rows=rows, precision=rows.dtype, rate=rows.frobenius() ** -2)
    ...
    ...     def _start(self, state, noise):
    ...         return (noise,)
    ...
    ...     def _step(self, state):
    ...         return lambda carry, k: (carry[0] - state.rate * state.rows.rmv(state.rows.mv(carry[0])),)
    >>> projection = Descent().apply(Descent().prepare(nb.DenseRows(torch.eye(2, 3))), torch.ones(1, 3))
    >>> projection.info.outcome.name, projection.directions[0, 2]
    ('CONVERGED', tensor(1.))
    """

    max_sweeps: int

    @abstractmethod
    def _start(self, state: Any, noise: Tensor) -> Carry:
        """Return the state of the iteration before the first step."""

    @abstractmethod
    def _step(self, state: Any) -> Step:
        """Return the function that takes a step."""

    def _apply(self, state: Any, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        rows = state.rows
        noise = check_noise(rows, noise)
        before = rows.norms(noise)
        target = residual_targets(self, rows, noise, before)
        if rows.reference is not rows:
            target = _MARGIN * target
        loop = _Loop.begin(self._start(state, noise), before, target, rows.n_parts)
        most = self.max_sweeps
        if store is not None and not loop.load(store.load(loop.tensors())):
            loop.carry = self._start(state, loop.carry[0])
            most += loop.k  # sweeps over other blocks, which may be smaller, do not count
        outcome = _run(loop, state, self._step(state), target, most, callback, store)
        attempt = Attempt(loop.directions, loop.taken, outcome, state.precision, norms=(loop.norms, before))
        return finish_projection(self, rows, noise, attempt, callback)


@dataclass
class _Loop:
    """Where an iteration is. Whatever is stored of it leads to the same result, bit by bit."""

    reference: Tensor  # (S,) |A noise|
    directions: Tensor  # (S, P)
    norms: Tensor  # (S,) |A v| when it was last measured
    best: Tensor  # (S,) the last |A v| that counted as a gain
    reached: Tensor  # (S,) the step of that gain
    taken: Tensor  # (S,) the last step whose result was measured
    active: Tensor  # indices of the samples that are not finished
    carry: Carry  # of those samples
    n_parts: int  # processes that the rows are spread over, on whose blocks the carry depends, except for its iterate
    k: int = 0  # steps so far
    next_check: int = 1  # the next step after which the residual is measured
    stagnated: bool = False  # whether any sample has

    @classmethod
    def begin(cls, carry: Carry, reference: Tensor, target: Tensor, n_parts: int) -> _Loop:
        active = (reference > target).nonzero()[:, 0]
        none = torch.zeros_like(reference, dtype=torch.int64)
        carried, norms = tuple(part[active] for part in carry), reference.clone()
        return cls(reference, carry[0].clone(), norms, norms.clone(), none, none.clone(), active, carried, n_parts)

    def tensors(self) -> dict[str, Tensor]:
        numbers = [self.k, self.next_check, self.stagnated, self.n_parts]
        counts = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        named = {name: getattr(self, name) for name in (*_STORED, "reference")}
        return {**named, "counts": counts, **{f"carry.{i}": part for i, part in enumerate(self.carry)}}

    def load(self, stored: Mapping[str, Tensor]) -> bool:
        """Take over what was stored; return whether all of its carry can be used, and not the iterate alone."""
        for name in _STORED:
            setattr(self, name, stored[name])
        self.carry = tuple(stored[f"carry.{i}"] for i in range(len(self.carry)))
        self.k, self.next_check, stagnated, n_parts = stored["counts"].tolist()
        self.stagnated = bool(stagnated)
        return bool(n_parts == self.n_parts)

    def measure(self, norms: Tensor) -> None:
        """Take over the iterate of the active samples, and what was measured of it."""
        self.directions[self.active] = self.carry[0]
        self.norms[self.active] = norms
        self.taken[self.active] = self.k


_STORED = ("directions", "norms", "best", "reached", "taken", "active")


def _run(
    loop: _Loop,
    state: Any,
    step: Step,
    target: Tensor,  # (S,)
    max_sweeps: int,
    callback: Callback | None,
    store: Store | None,
) -> Outcome:
    """Step until each sample meets its target, and return why it ended.

    The residual is recomputed from the rows after steps 1 to 5, then every time the steps have grown by a fifth, so
    that measuring costs little. The schedule is fixed and samples never mix: the result of a sample does not depend on
    the others.

    Ctrl-C ends the loop after the last finished step, whose residual is measured; a second one passes through. A
    measurement that was interrupted is repeated when the iteration is resumed.
    """
    rows = state.rows
    try:
        while len(loop.active):
            if loop.k < loop.next_check:  # else the measurement after step k is still to be made
                if loop.k == max_sweeps:
                    return Outcome.MAX_SWEEPS
                loop.carry, loop.k = step(loop.carry, loop.k + 1), loop.k + 1  # together, against Ctrl-C in between
            if loop.k == loop.next_check:
                _check(loop, rows.norms(loop.carry[0]), target, max_sweeps, callback)
            if store is not None and len(loop.active):
                store.save(loop.tensors())
    except KeyboardInterrupt:
        if store is not None:
            store.save(loop.tensors(), interrupted=True)
        if not rows.is_alone:  # the other processes may be at another sweep
            raise
        if len(loop.active):
            loop.measure(rows.norms(loop.carry[0]))
        return Outcome.INTERRUPTED
    return Outcome.STAGNATED if loop.stagnated else Outcome.CONVERGED


def _check(loop: _Loop, now: Tensor, target: Tensor, max_sweeps: int, callback: Callback | None) -> None:
    """Judge the active samples by their residuals after step k, and let those go that are finished."""
    k, active = loop.k, loop.active
    if not torch.isfinite(now).all():
        msg = f"NaN or Inf appeared in sweep {k}: look for extreme values in the rows."
        raise NullBayesError(msg)
    loop.measure(now)
    gained = now < 0.999 * loop.best[active]  # compared with the last gain, so that small gains add up
    loop.reached[active] = torch.where(gained, k, loop.reached[active])
    loop.best[active] = torch.where(gained, now, loop.best[active])
    if callback is not None:
        callback(k, relative_residual(loop.norms, loop.reference))
    stuck = (now > target[active]) & (k > 2 * loop.reached[active] + _PATIENCE)
    loop.stagnated |= bool(stuck.any())
    going = (now > target[active]) & ~stuck
    following = max(k + 1, min(k + max(1, k // 5), max_sweeps))
    loop.active, loop.carry, loop.next_check = active[going], tuple(part[going] for part in loop.carry), following
