"""An iteration resumed from any stored state ends bit for bit where an uninterrupted one ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Alternating, Iterative, Krylov, Outcome, Projection
from nullbayes.testing import cases
from support.drawing import randn

MATRIX = next(case.matrix for case in cases(torch.get_default_device()) if case.name == "nearly_parallel_blocks")
NOISE = randn(5, 100, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
# samples are let go one after the other, and the last of them, huge in the kernel, is soon down to its rounding
_, _, AXES = torch.linalg.svd(MATRIX)
NOISE[-1] = 1e10 * AXES[-1]
NOISE[-1] += AXES[0] * 40 * torch.finfo(torch.float64).eps * MATRIX.norm() * 1e10 / (MATRIX @ AXES[0]).norm()
ENDS: dict[str, tuple[Callable[[], Iterative], Outcome]] = {
    "Krylov converges": (lambda: Krylov(Alternating(block_rows=10), rtol=1e-6, atol=1e-4), Outcome.CONVERGED),
    "Alternating converges": (lambda: Alternating(block_rows=20, rtol=0.05, atol=1e-4), Outcome.CONVERGED),
    "one sample stagnates": (lambda: Krylov(Alternating(block_rows=10), rtol=1e-6), Outcome.STAGNATED),
    "all samples stagnate": (lambda: Alternating(block_rows=1000, rtol=1e-17, max_sweeps=2000), Outcome.STAGNATED),
    "Krylov runs out": (lambda: Krylov(Alternating(block_rows=10), max_sweeps=8, rtol=1e-9), Outcome.MAX_SWEEPS),
    "Alternating runs out": (lambda: Alternating(block_rows=10, max_sweeps=23, rtol=1e-9), Outcome.MAX_SWEEPS),
}
each_end = pytest.mark.parametrize(("make", "outcome"), ENDS.values(), ids=ENDS)


class Memory:
    """Keeps every state, and begins with one of them."""

    def __init__(self, first: Mapping[str, Tensor] | None = None) -> None:
        self.first, self.states, self.interrupted = first, list[dict[str, Tensor]](), False

    def load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return state if self.first is None else {name: tensor.clone() for name, tensor in self.first.items()}

    def save(self, state: Mapping[str, Tensor], *, interrupted: bool = False) -> None:
        self.states.append({name: tensor.clone() for name, tensor in state.items()})
        self.interrupted = interrupted


class Interrupted(nb.DenseRows):
    """A matrix that is interrupted at the given use of a block, counted from 1."""

    used, stop_at = 0, 0

    def block(self, start: int, stop: int) -> Any:
        self.used += 1
        if self.used == self.stop_at:
            raise KeyboardInterrupt
        return super().block(start, stop)


def project(projector: Iterative, store: Memory, rows: nb.Rows | None = None, **options: Any) -> Projection:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        state = projector.prepare(rows or nb.DenseRows(MATRIX))
        if isinstance(rows, Interrupted):
            rows.frobenius()
            rows.used = 0
        return projector.apply(state, NOISE, store=store, **options)


def same(left: Projection, right: Projection) -> bool:
    told = [(p.info.outcome, p.info.sweeps, p.info.residual.tolist()) for p in (left, right)]
    return torch.equal(left.directions, right.directions) and told[0] == told[1]


@each_end
def test_resuming_from_every_stored_state_gives_the_same_result(
    make: Callable[[], Iterative], outcome: Outcome
) -> None:
    kept = Memory()
    whole = project(make(), kept)
    assert whole.info.outcome is outcome
    assert [int(state["counts"][0]) for state in kept.states] == list(range(1, len(kept.states) + 1))
    assert whole.info.sweeps - len(kept.states) in (0, 1)  # the last step may leave nothing to go on with
    for state in kept.states[:: max(1, len(kept.states) // 6)] + kept.states[-2:]:
        again = Memory(state)
        assert same(project(make(), again), whole)
        assert len(again.states) == len(kept.states) - int(state["counts"][0])


@each_end
def test_resuming_after_every_interruption_gives_the_same_result(
    make: Callable[[], Iterative], outcome: Outcome
) -> None:
    rows = Interrupted(MATRIX)
    whole = project(make(), Memory(), rows)
    stopped = set()
    for use in range(15, rows.used, max(1, rows.used // 15)):  # in steps and in measurements
        rows.stop_at, left = use, Memory()
        try:
            part = project(make(), left, rows)
        except KeyboardInterrupt:
            continue  # before the first step, or after the last
        assert part.info.outcome is Outcome.INTERRUPTED or part.info.converged.all()
        assert left.interrupted
        stopped.add(int(left.states[-1]["counts"][0]) == int(left.states[-1]["counts"][1]))
        assert same(project(make(), Memory(left.states[-1])), whole)
    assert False in stopped


def test_an_interrupted_measurement_is_repeated() -> None:
    def stop(sweeps: int, _: Tensor) -> None:
        if sweeps == wanted:
            raise KeyboardInterrupt

    make = ENDS["Krylov converges"][0]
    whole = project(make(), Memory())
    for wanted in (1, 3, 5, 6, 12):
        left = Memory()
        part = project(make(), left, callback=stop)
        assert part.info.sweeps == wanted
        assert left.states[-1]["counts"][:2].tolist() == [wanted, wanted]
        assert same(project(make(), Memory(left.states[-1])), whole)


# Krylov with a tolerance that takes few sweeps: after many, rounding decides which of them is the last.
SOONER: dict[str, Callable[[], Iterative]] = {
    name: make for name, (make, _) in ENDS.items() if name in ("Krylov runs out", "Alternating converges")
} | {"Krylov converges": lambda: Krylov(Alternating(block_rows=10), rtol=1e-3, atol=1e-4)}


@pytest.mark.parametrize("name", SOONER)
def test_sweeps_are_told_for_each_sample(name: str) -> None:
    """They are those after which a sample alone is finished, and the same when the iteration is resumed."""
    make, kept = SOONER[name], Memory()
    whole = project(make(), kept)
    taken = whole.info.sweeps_per_sample
    assert taken.shape == (len(NOISE),)
    assert int(taken.max()) == whole.info.sweeps
    again = project(make(), Memory(kept.states[len(kept.states) // 2]))
    assert torch.equal(again.info.sweeps_per_sample, taken)
    projector = make()
    state = projector.prepare(nb.DenseRows(MATRIX))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        alone = [projector.apply(state, one[None]).info.sweeps for one in NOISE]
    assert alone == taken.tolist()
    assert name == "Krylov runs out" or len(set(alone)) > 1
