"""Without memory for all new samples, `extend` draws fewer at a time, then by a smaller plan; earlier samples stay.

Nothing is pretended: processes are given too little address space, and networks ask for more memory than there is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.errors import SettingsError
from nullbayes.limits import is_out_of_memory
from nullbayes.projectors import Alternating, ExactDual, Krylov
from support.memory_shortage import (
    DATA,
    Hungry,
    Plain,
    fed,
    fit_with_projector,
    in_a_process,
    on_linux,
    problem,
    starve,
)

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

MORE = 40  # 4 MiB a copy of the vectors
# --- too little address space -----------------------------------------------------------------------------------------


def fitted() -> Any:
    model, data = problem()
    return fit_with_projector(model, [(data[0][0][:60], data[0][1][:60])], "auto")


def starved(place: str) -> None:
    """Extend in a process that has too little memory."""
    fitted().extend(2, progress=False)  # libraries load
    posterior = fitted()
    starve(14)
    posterior.extend(MORE, progress=False)
    fed()
    posterior.save(place)


@on_linux
@pytest.mark.cpu
@pytest.mark.slow
def test_fewer_samples_at_a_time_are_the_same_samples(tmp_path: Path) -> None:
    in_a_process(__file__, str(tmp_path / "starved"))
    whole = fitted().extend(MORE, progress=False)
    assert whole.report.notes == ()
    starved = nb.load(tmp_path / "starved", problem()[0])
    assert [note[:40] for note in starved.report.notes] == ["memory ran out; extend drew the samples "]
    assert starved.report.reason == whole.report.reason
    torch.testing.assert_close(starved.directions, whole.directions)
    assert starved.report.train_std == pytest.approx(whole.report.train_std)


# --- an allocation that fails -----------------------------------------------------------------------------------------


# posterior, rows, projector, notes after so many failures, and whether nothing was left to build with at the end
CASES: dict[str, tuple[type, type, Any, dict[int, list[str]], bool]] = {
    "blocks": (
        nb.ProjectedPosterior, nb.OutputJacobian, Krylov(Alternating(block_rows=6), rtol=0.1),
        {1: ["2 at a time"], 2: ["1 at a time"], 3: ["blocks of 3 rows, rows formed again", "1 at a time"]}, True,
    ),
    "no blocks": (
        nb.LossProjectedPosterior, nb.LossJacobian, ExactDual(), {1: ["2 at a time"], 2: ["1 at a time"]}, False,
    ),
}  # fmt: skip


def opened(name: str) -> tuple[Any, Hungry]:
    """Two samples, and rows that are formed again whenever they are needed: each time the network is called."""
    kind, rows, projector, *_ = CASES[name]
    model = Plain().failing_at(0)
    little = rows(model, DATA).costs().held_bytes
    return fit_with_projector(model, DATA, projector, kind=kind, n_samples=2, memory_limit=little), model.failing_at(0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "blocks" else n for n in CASES])
def test_extend_recovers_from_a_failed_allocation(name: str) -> None:
    whole = opened(name)[0].extend(3, progress=False)
    calls = Hungry.calls
    assert calls
    for failures, expected in CASES[name][3].items():
        posterior, model = opened(name)
        model.failing_at(calls if failures == 1 else 1, failures)
        posterior.extend(3, progress=False)
        notes = posterior.report.notes
        assert all(note.startswith("memory ran out; ") for note in notes)
        assert [part in note for part, note in zip(expected, notes, strict=True)] == [True] * len(expected), notes
        assert posterior.report.converged
        assert torch.equal(posterior.directions[:2], whole.directions[:2])
        if len(notes) == 1:  # by the same plan
            torch.testing.assert_close(posterior.directions, whole.directions)
            assert posterior.report.train_std == pytest.approx(whole.report.train_std)


@pytest.mark.parametrize("name", CASES)
def test_a_failed_extension_keeps_the_earlier_samples(name: str) -> None:
    (posterior, model), x, released = opened(name), DATA[0][0], CASES[name][-1]
    report, before = posterior.report, posterior.predict(x).samples
    model.failing_at(1, 10**9)
    with pytest.raises(SettingsError, match="The posterior keeps the 2 samples that it has") as caught:
        posterior.extend(3, progress=False)
    assert caught.value.__cause__ is not None
    assert is_out_of_memory(caught.value.__cause__)
    assert ("Call prepare(loader)" in str(caught.value)) == released
    assert (posterior._prepared is None) == released  # nothing that is half built is held
    model.failing_at(0)
    assert posterior.report == report
    assert torch.equal(posterior.predict(x).samples, before)
    if released:
        posterior.prepare(DATA, projector=CASES[name][2])
    posterior.extend(3, progress=False)
    torch.testing.assert_close(posterior.directions, opened(name)[0].extend(3, progress=False).directions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    starved(sys.argv[1])
