"""The loop that all iterative projectors share: sweep, measure the residual, and let finished samples go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError
from nullbayes.linalg.rows import Rows
from nullbayes.projectors.base import Callback, Outcome, Projection, Projector, Store
from nullbayes.projectors.stopping import Attempt, check_noise, finish_projection, relative_residual, residual_targets

Carry = tuple[Tensor, ...]  # each (S, ...); the first is the iterate v
Step = Callable[[Carry, int], Carry]  # the state before step k, counted from 1, and k -> the state after it
Guess = Callable[[Carry], Tensor | None]  # -> (S,)

_MARGIN = 0.9  # part of the tolerance to reach on rows in half precision: the result is judged on the full rows
_PATIENCE = 50  # a sample has stagnated when step k brings no gain and k > 2 k₀ + 50, with k₀ the step of its last gain


class Iterative(Projector):
    """A projector that works step by step, so that it can stop after a step and continue later.

    A subclass says where to start (``_start``) and what a step is (``_step``). A step must return new tensors and leave
    those it was given as they are, and samples must not mix. One whose steps are a linear map of the noise sets
    ``adapts`` to False and overrides ``apply_transposed``. The state of ``_prepare`` has ``rows`` and ``precision``.

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
    adapts = True

    @abstractmethod
    def _start(self, state: Any, noise: Tensor) -> Carry:
        """Return the state of the iteration before the first step."""

    @abstractmethod
    def _step(self, state: Any) -> Step:
        """Return the function that takes a step."""

    def apply_transposed(self, state: Any, vectors: Tensor, sweeps: int) -> Tensor:
        """Take each vector through as many steps of its own; without steps it stays, wherever they would start."""
        vectors = check_noise(state.rows, vectors)
        if sweeps == 0:
            return vectors
        carry, step = self._start(state, vectors), self._step(state)
        for k in range(sweeps):
            carry = step(carry, k + 1)
        return carry[0]

    def _guess(self, state: Any, carry: Carry) -> Tensor | None:  # (S,)
        """Return what the steps themselves say of ``|A v|``, without a product with the rows; None if they do not.

        It saves products: a sample is then measured when it seems to be finished, and otherwise seldom. It is no
        residual, because the steps may drift.
        """
        return None

    def _apply(self, state: Any, noise: Tensor, callback: Callback | None, store: Store | None) -> Projection:
        rows = state.rows
        noise = check_noise(rows, noise)
        before = rows.norms(noise)
        target = residual_targets(self, rows, noise, before)
        if rows.reference is not rows:
            target = _MARGIN * target
        loop = _Loop.begin(self._start(state, noise), noise, before, target, rows.row_group.size)
        most = self.max_sweeps
        if store is not None and not loop.load(store.load(loop.tensors())):
            loop.carry = self._start(state, loop.carry[0])
            most += loop.k  # sweeps over other blocks, which may be smaller, do not count
        guess = partial(self._guess, state)
        outcome = _run(loop, state.rows, self._step(state), guess, target, most, callback, store)
        attempt = Attempt(loop.directions, loop.taken, outcome, state.precision, norms=(loop.norms, before))
        return finish_projection(self, rows, noise, attempt, callback)


@dataclass
class _Loop:
    """Where an iteration is. Whatever is stored of it leads to the same result, bit by bit."""

    reference: Tensor  # (S,) |A noise|
    directions: Tensor  # (S, P) when they were last measured: the noise, before the first time
    norms: Tensor  # (S,) |A v| when it was last measured
    best: Tensor  # (S,) the last |A v| that counted as a gain
    reached: Tensor  # (S,) the step of that gain
    taken: Tensor  # (S,) the last step whose result was measured
    active: Tensor  # indices of the samples that are not finished
    carry: Carry  # of those samples
    n_parts: int  # processes that the rows are spread over, on whose blocks the carry depends, except for its iterate
    k: int = 0  # steps so far
    next_check: int = 1  # the next step after which residuals are measured, or guesses tell which of them
    stagnated: bool = False  # whether any sample has

    @classmethod
    def begin(cls, carry: Carry, noise: Tensor, reference: Tensor, target: Tensor, n_parts: int) -> _Loop:
        active = (reference > target).nonzero()[:, 0]
        none = torch.zeros_like(reference, dtype=torch.int64)
        carried, norms = tuple(part[active] for part in carry), reference.clone()
        return cls(reference, noise.clone(), norms, norms.clone(), none, none.clone(), active, carried, n_parts)

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

    def measure(self, rows: Rows, which: Tensor) -> Tensor:  # (active,) places -> norms
        """Measure some of the active samples, and take over their iterates."""
        iterates, samples = self.carry[0][which], self.active[which]
        norms = rows.norms(iterates)
        if not torch.isfinite(norms).all():
            msg = f"NaN or Inf appeared in sweep {self.k}: look for extreme values in the rows."
            raise NullBayesError(msg)
        self.directions[samples], self.norms[samples], self.taken[samples] = iterates, norms, self.k
        return norms


_STORED = ("directions", "norms", "best", "reached", "taken", "active")


def _run(
    loop: _Loop,
    rows: Rows,
    step: Step,
    guess: Guess,
    target: Tensor,  # (S,)
    max_sweeps: int,
    callback: Callback | None,
    store: Store | None,
) -> Outcome:
    """Step until each sample meets its target, and return why it ended.

    The residual is recomputed from the rows after steps 1 to 5, then every time the steps have grown by a fifth, so
    that measuring costs little; where the steps have a guess, of samples that seem to be finished, and else after
    multiples of 16. The schedule is fixed and samples never mix: the result of a sample does not depend on the others.

    Ctrl-C ends the loop after the last finished step, whose residual is measured; a second one passes through. A
    measurement that was interrupted is repeated when the iteration is resumed.
    """
    try:
        while len(loop.active):
            if loop.k < loop.next_check:  # else the measurement after step k is still to be made
                if loop.k == max_sweeps:
                    return Outcome.MAX_SWEEPS
                loop.carry, loop.k = step(loop.carry, loop.k + 1), loop.k + 1  # together, against Ctrl-C in between
            if loop.k == loop.next_check:
                _check(loop, rows, guess(loop.carry), target, max_sweeps, callback)
            if store is not None and len(loop.active):
                store.save(loop.tensors())
    except KeyboardInterrupt:
        if store is not None:
            store.save(loop.tensors(), interrupted=True)
        if not rows.is_alone:  # the other processes may be at another sweep
            raise
        if len(loop.active):
            loop.measure(rows, torch.arange(len(loop.active), device=loop.active.device))
        return Outcome.INTERRUPTED
    return Outcome.STAGNATED if loop.stagnated else Outcome.CONVERGED


def _check(
    loop: _Loop, rows: Rows, guessed: Tensor | None, target: Tensor, max_sweeps: int, callback: Callback | None
) -> None:
    """Judge active samples by their residuals after step k, and let those go that are finished."""
    k, active = loop.k, loop.active
    following = k + 1 if guessed is not None else max(k + 1, min(k + max(1, k // 5), max_sweeps))
    due = torch.ones_like(active, dtype=torch.bool)
    if guessed is not None and k != max_sweeps and k % 16:
        due = ~(guessed > target[active])  # NaN is measured, too
    which = due.nonzero()[:, 0]
    now = loop.measure(rows, which) if len(which) else None
    if callback is not None:
        callback(k, relative_residual(_told(loop, guessed, ~due), loop.reference))
    if now is not None:
        samples, going = active[which], torch.ones_like(due)
        gained = now < 0.999 * loop.best[samples]  # compared with the last gain, so that small gains add up
        loop.reached[samples] = torch.where(gained, k, loop.reached[samples])
        loop.best[samples] = torch.where(gained, now, loop.best[samples])
        stuck = (now > target[samples]) & (k > 2 * loop.reached[samples] + _PATIENCE)
        loop.stagnated |= bool(stuck.any())
        going[which] = (now > target[samples]) & ~stuck
        loop.active, loop.carry = active[going], tuple(part[going] for part in loop.carry)
    loop.next_check = following


def _told(loop: _Loop, guessed: Tensor | None, others: Tensor) -> Tensor:  # (active,), bool (active,) -> (S,)
    """Return the norms when they were last measured, with guesses in place of older ones."""
    if guessed is None:
        return loop.norms
    return loop.norms.index_copy(0, loop.active[others], guessed[others].to(loop.norms))
