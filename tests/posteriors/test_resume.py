"""A fit that was killed continues from its checkpoint and ends bit for bit as an uninterrupted one.

The fits that are killed run in processes of their own, which kill themselves at a moment that is the same every time.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError
from nullbayes.posteriors import checkpoint
from nullbayes.posteriors.checkpoint import Checkpoint
from support.checkpoint_fits import PROJECTORS, counted, fit_in_sweeps, interrupted, left, seeded, told
from support.models import MLP, REGRESSION

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),
    pytest.mark.usefixtures("at_every_sweep"),
]


# --- killed -----------------------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """Have the process killed at a call of a function, before or after it."""
    function, calls = getattr(owner, name), iter(range(1, 10**6))

    def deadly(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == number
        if last and not after:
            kill()
        result = function(*args, **kwargs)
        if last:
            kill()
        return result

    setattr(owner, name, deadly)


def in_the_middle(number: int) -> None:
    """Have the process killed when half of a file is written."""
    write, calls = io.save_file, iter(range(1, 10**6))

    def deadly(contents: Any, path: Path, **options: Any) -> None:
        write(contents, path, **options)
        if next(calls) == number:
            os.truncate(path, path.stat().st_size // 2)
            kill()

    io.save_file = deadly


# where a fit is killed, and the sweep that it has stored then; the first file is written before the first sweep
MOMENTS: dict[str, tuple[Callable[[], None], int | None]] = {
    "in the middle of the first writing": (lambda: in_the_middle(1), None),
    "before the first renaming": (lambda: at_call(os, "replace", 1), None),
    "after the first renaming": (lambda: at_call(os, "replace", 1, after=True), 0),
    "before the first sweep": (lambda: at_call(Checkpoint, "load", 1), 0),
    "after a sweep": (lambda: at_call(Checkpoint, "save", 7), 6),
    "in the middle of a writing": (lambda: in_the_middle(8), 6),
    "before a renaming": (lambda: at_call(os, "replace", 8), 6),
    "after a renaming": (lambda: at_call(os, "replace", 8, after=True), 7),
    "after a sweep was stored": (lambda: at_call(Checkpoint, "save", 7, after=True), 7),
    "late": (lambda: at_call(Checkpoint, "save", 19, after=True), 19),
    "before the removal": (lambda: at_call(io, "remove", 2), -1),
    "after the removal": (lambda: at_call(io, "remove", 2, after=True), None),
}
KILLED = [("Krylov", moment) for moment in MOMENTS] + [("Alternating", moment) for moment in list(MOMENTS)[4:8]]


def killed(folder: Path) -> dict[str, int]:
    """Fit once for each projector and moment, each in a fork that does not survive it; return how it ended."""
    ends = {}
    fit_in_sweeps()  # let libraries load, once for all
    checkpoint._EVERY, checkpoint._SHARE = 0.0, float("inf")
    for name, moment in KILLED:
        place = folder / name / moment
        place.mkdir(parents=True)
        if not (child := os.fork()):
            torch.manual_seed(123)
            MOMENTS[moment][0]()
            fit_in_sweeps(PROJECTORS[name], checkpoint=place / "fit")
            os._exit(0)
        ends[f"{name}, {moment}"] = os.waitpid(child, 0)[1]
    return ends


@pytest.fixture(scope="module")
def graves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout).values()) == {signal.SIGKILL}
    return folder


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return {name: fit_in_sweeps(projector, generator=seeded()) for name, projector in PROJECTORS.items()}


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are copies of another")
@pytest.mark.parametrize(("name", "moment"), KILLED)
def test_a_killed_fit_resumes_bit_for_bit(name: str, moment: str, graves: Path, uninterrupted: dict[str, Any]) -> None:
    path, sweep, whole = graves / name / moment / "fit", MOMENTS[moment][1], uninterrupted[name]
    assert path.exists() == (sweep is not None)
    if sweep is not None:
        with pytest.raises(FileError, match="checkpoint of a fit that has not finished"):
            nb.load(path, MLP.build())
        stored = io.read(path)[0]
        reached = int(stored["counts"][0]) if stored else 0
        assert reached == sweep or (sweep == -1 and whole.report.sweeps - reached in (0, 1))
    torch.manual_seed(123 if sweep is None else 7)  # where there is a file, the seed is in it
    with counted() as sweeps:
        resumed = fit_in_sweeps(PROJECTORS[name], checkpoint=path)
    assert torch.equal(resumed.directions, whole.directions)
    assert told(resumed) == told(whole)
    assert sweeps[:1] == ([] if sweep == -1 else [(sweep or 0) + 1])
    assert left(path.parent) == []


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROJECTORS)
def test_an_interrupted_fit_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    part = interrupted(tmp_path / "fit", projector=PROJECTORS[name])
    assert part.report.sweeps == 7
    assert left(tmp_path) == ["fit"]
    with counted() as sweeps:
        resumed = fit_in_sweeps(PROJECTORS[name], checkpoint=str(tmp_path / "fit"))
    whole = fit_in_sweeps(PROJECTORS[name], generator=seeded())
    assert sweeps[0] == 8
    assert torch.equal(resumed.directions, whole.directions)
    assert told(resumed) == told(whole)
    assert left(tmp_path) == []


def test_ctrl_c_stores_the_last_sweep_whatever_the_interval(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_EVERY", 3600.0)
        interrupted(tmp_path / "fit")
    assert io.read(tmp_path / "fit")[0]["counts"][0] == 7


@pytest.mark.cpu
def test_a_resumed_fit_keeps_its_plan_whatever_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"projector": "auto", "tolerance": 1e-3}
    monkeypatch.setattr("nullbayes.projectors.auto._DIRECT", 0)
    monkeypatch.setattr("nullbayes.posteriors.arguments.free_memory", lambda device: 200_000)
    whole = fit_in_sweeps(**settings, generator=seeded())
    interrupted(tmp_path / "fit", 2, **settings)
    monkeypatch.setattr("nullbayes.posteriors.arguments.free_memory", lambda device: 2**32)
    resumed = fit_in_sweeps(**settings, checkpoint=tmp_path / "fit")
    assert fit_in_sweeps(**settings, generator=seeded()).report.reason != whole.report.reason
    assert torch.equal(resumed.directions, whole.directions)
    assert told(resumed) == told(whole)


@pytest.mark.filterwarnings("ignore:The network fits its:nullbayes.errors.NullBayesWarning")
def test_a_regression_with_several_outputs_resumes(tmp_path: Path) -> None:
    """The noise of each output is a part of what tells the fit."""
    kind = functools.partial(nb.ProjectedPosterior, likelihood="regression")
    settings = {"kind": kind, "model": MLP.build(2), "data": [REGRESSION.data(n=12)]}
    interrupted(tmp_path / "fit", 3, **settings)
    resumed = fit_in_sweeps(**settings, checkpoint=tmp_path / "fit")
    assert torch.equal(resumed.directions, fit_in_sweeps(**settings, generator=seeded()).directions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(killed(Path(sys.argv[1]))))
