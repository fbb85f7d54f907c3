"""A fit that was killed goes on where its checkpoint is, and ends as one that was not, bit by bit.

The fits that are killed run in processes of their own, which kill themselves at a moment that is the same every time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nullbayes as nb
from drawing import randn
from files import rewritten
from models import CLASSIFICATION, MLP, batches
from nullbayes import io
from nullbayes.errors import ConvergenceWarning, FileError, NullBayesWarning, SettingsError
from nullbayes.posteriors import checkpoint
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos, Projection, Projector

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

KRYLOV = Krylov(Alternating(block_rows=3), rtol=1e-2)
PROJECTORS: dict[str, Any] = {
    "Krylov": KRYLOV,
    "Alternating": Alternating(block_rows=6, rtol=0.05),
    "out of sweeps": Alternating(block_rows=3, rtol=1e-6, max_sweeps=25),
}


def fit(projector: Any = KRYLOV, kind: type = nb.ProjectedPosterior, **settings: Any) -> Any:
    given = {"model": MLP.build(), "data": [CLASSIFICATION.data(n=12)], "n_samples": 4, "progress": False, **settings}
    options = {name: given.pop(name) for name in ("parameters", "hessian") if name in given}
    posterior = kind(given.pop("model"), prior_precision=1.0, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sweeps ran out", category=ConvergenceWarning)
        return posterior.fit(given.pop("data"), given.pop("n_samples"), projector=projector, **given)


def seeded(seed: int = 123) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def told(posterior: Any) -> dict[str, Any]:
    """The report, but for what no two runs have in common."""
    report = posterior.report.to_dict()
    return {name: value for name, value in report.items() if name not in ("seconds", "peak_memory")}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def at_every_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", float("inf"))


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The sweeps after which a fit hands out its state."""
    seen, save = list[int](), Checkpoint.save

    def note(self: Checkpoint, state: Any, **options: Any) -> None:
        seen.append(int(state["counts"][0]))
        save(self, state, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save", note)
        yield seen


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
    fit()  # let libraries load, once for all
    checkpoint._EVERY, checkpoint._SHARE = 0.0, float("inf")
    for name, moment in KILLED:
        place = folder / name / moment
        place.mkdir(parents=True)
        if not (child := os.fork()):
            torch.manual_seed(123)
            MOMENTS[moment][0]()
            fit(PROJECTORS[name], checkpoint=place / "fit")
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
    return {name: fit(projector, generator=seeded()) for name, projector in PROJECTORS.items()}


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are copies of another")
@pytest.mark.parametrize(("name", "moment"), KILLED)
def test_a_killed_fit_resumes_bit_by_bit(name: str, moment: str, graves: Path, uninterrupted: dict[str, Any]) -> None:
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
        resumed = fit(PROJECTORS[name], checkpoint=path)
    assert torch.equal(resumed.directions, whole.directions)
    assert told(resumed) == told(whole)
    assert sweeps[:1] == ([] if sweep == -1 else [(sweep or 0) + 1])
    assert left(path.parent) == []


# --- interrupted ------------------------------------------------------------------------------------------------------


def interrupted(path: Path, sweep: int = 7, **settings: Any) -> Any:
    """A fit that is stopped by Ctrl-C after a sweep, before that is written."""
    save, calls = Checkpoint.save, iter(range(1, 10**6))

    def stop(self: Checkpoint, state: Any, **options: Any) -> None:
        if next(calls) == sweep:
            raise KeyboardInterrupt
        save(self, state, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop)
        with pytest.warns(ConvergenceWarning, match="stopped by the user"):
            return fit(checkpoint=path, **{"generator": seeded(), **settings})


@pytest.mark.parametrize("name", PROJECTORS)
def test_an_interrupted_fit_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    part = interrupted(tmp_path / "fit", projector=PROJECTORS[name])
    assert part.report.sweeps == 7
    assert left(tmp_path) == ["fit"]
    with counted() as sweeps:
        resumed = fit(PROJECTORS[name], checkpoint=str(tmp_path / "fit"))
    whole = fit(PROJECTORS[name], generator=seeded())
    assert sweeps[0] == 8
    assert torch.equal(resumed.directions, whole.directions)
    assert told(resumed) == told(whole)
    assert left(tmp_path) == []


def test_ctrl_c_stores_the_last_sweep_however_short_ago_the_one_before_was(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_EVERY", 3600.0)
        interrupted(tmp_path / "fit")
    assert io.read(tmp_path / "fit")[0]["counts"][0] == 7


def test_writing_waits_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 3600.0)
    written, save = list[int](), io.save
    monkeypatch.setattr(io, "save", lambda path, contents, *args, **kwargs: (
        written.append(len(contents)), save(path, contents, *args, **kwargs)
    ))  # fmt: skip
    fit(checkpoint=tmp_path / "fit")
    assert written == [0]  # before the first sweep, to see that it can be done


@pytest.mark.cpu
def test_a_plan_is_kept_whatever_memory_is_free_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"projector": "auto", "tolerance": 1e-3}
    monkeypatch.setattr("nullbayes.projectors.auto._DIRECT", 0)
    monkeypatch.setattr("nullbayes.posteriors.resources.free_memory", lambda device: 200_000)
    whole = fit(**settings, generator=seeded())
    interrupted(tmp_path / "fit", 2, **settings)
    monkeypatch.setattr("nullbayes.posteriors.resources.free_memory", lambda device: 2**32)
    resumed = fit(**settings, checkpoint=tmp_path / "fit")
    assert fit(**settings, generator=seeded()).report.reason != whole.report.reason
    assert torch.equal(resumed.directions, whole.directions)
    assert told(resumed) == told(whole)


# --- not the same fit -------------------------------------------------------------------------------------------------


def other_model() -> Any:
    model = MLP.build()
    model.state_dict()["2.bias"][0] += 1e-12
    return model


def other_data() -> list[tuple[Tensor, Tensor]]:
    x, y = CLASSIFICATION.data(n=12)
    x[7, 2] += 1e-12
    return [(x, y)]


def other_targets() -> list[tuple[Tensor, Tensor]]:
    x, y = CLASSIFICATION.data(n=12)
    return [(x, y.roll(1))]


def scaled(n: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(n, 51, generator=generator, dtype=torch.float64, device="cpu")


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "samples": (lambda: {"n_samples": 5}, "n_samples was 4 and is 5"),
    "tolerance": (lambda: {"tolerance": 0.5}, "tolerance was 0.01 and is 0.5"),
    "blocks": (lambda: {"projector": Krylov(Alternating(block_rows=6), rtol=1e-4)}, "projector was .*block_rows=6"),
    "projector": (lambda: {"projector": ExactDual()}, "projector was 'Krylov.* and is 'ExactDual"),
    "model": (lambda: {"model": other_model()}, "another model"),
    "data": (lambda: {"data": other_data()}, "another data"),
    "targets": (lambda: {"data": other_targets()}, "another data"),
    "fewer data": (lambda: {"data": [CLASSIFICATION.data(n=11)]}, "another data"),
    "hessian": (lambda: {"hessian": True}, "hessian was False and is True"),
    "rows": (lambda: {"kind": nb.LossProjectedPosterior}, "rows was 'OutputJacobian' and is 'LossJacobian'"),
    "parameters": (lambda: {"parameters": "2.*"}, "parameters was "),
    "limit": (lambda: {"memory_limit": "1GB"}, "memory_limit was None and is '1GB'"),
    "base": (lambda: {"base": scaled}, "another noise"),
    "seed": (lambda: {"generator": seeded(5)}, "generator had another seed"),
}


@pytest.mark.parametrize(("change", "fragment"), OTHERS.values(), ids=OTHERS)
def test_the_checkpoint_of_another_fit_is_refused_and_kept(
    change: Callable[[], dict[str, Any]], fragment: str, tmp_path: Path
) -> None:
    interrupted(tmp_path / "fit")
    before = (tmp_path / "fit").read_bytes()
    with pytest.raises(FileError, match=f"belongs to another fit: .*{fragment}.*delete the file, or pass another path"):
        fit(**change(), checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before
    assert left(tmp_path) == ["fit"]


def test_a_base_distribution_is_known_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "fit", base=scaled)
    before = (tmp_path / "fit").read_bytes()
    with pytest.raises(FileError, match="another noise"):
        fit(base=lambda n, generator: 2 * scaled(n, generator), checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before
    resumed = fit(base=scaled, checkpoint=tmp_path / "fit")
    assert torch.equal(resumed.directions, fit(base=scaled, generator=seeded()).directions)


def test_another_loss_of_ones_own_is_seen_in_the_rows(tmp_path: Path) -> None:
    def fit_loss(power: float) -> Any:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.abs().pow(power).sum(1) + targets

        posterior = nb.LossProjectedPosterior(MLP.build(), loss, prior_precision=1.0)
        data, projector = [CLASSIFICATION.data(n=12)], Alternating(block_rows=2, rtol=1e-3)
        return posterior.fit(data, 4, projector=projector, checkpoint=tmp_path / "fit", progress=False)

    def stop(self: Checkpoint, state: Any, **options: Any) -> None:
        save(self, state, **options)
        if state["counts"][0] == 3:
            raise RuntimeError("enough")

    save = Checkpoint.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop)
        with pytest.raises(RuntimeError, match="enough"):
            fit_loss(2.0)
    with pytest.raises(FileError, match="rows or its noise are other numbers"):
        fit_loss(3.0)
    assert left(tmp_path) == ["fit"]
    fit_loss(2.0)
    assert left(tmp_path) == []


def test_the_batches_that_the_data_come_in_do_not_matter(tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    fit(data=batches(*CLASSIFICATION.data(n=12), (5, 5, 2)), checkpoint=tmp_path / "fit", generator=seeded())
    assert left(tmp_path) == []


# --- not a checkpoint -------------------------------------------------------------------------------------------------


def test_a_posterior_is_not_overwritten(tmp_path: Path) -> None:
    posterior = fit()
    posterior.save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    for projector in (KRYLOV, ExactDual(), "auto"):
        with pytest.raises(FileError, match="holds a posterior, not a checkpoint: pass another path"):
            fit(projector, checkpoint=tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before
    assert torch.equal(nb.load(tmp_path / "file", MLP.build()).directions, posterior.directions)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.3, 0.9, -1])
def test_a_truncated_checkpoint_is_refused_and_kept(keep: float, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    whole = (tmp_path / "fit").read_bytes()
    cut = whole[: int(keep * len(whole)) if isinstance(keep, float) else keep % len(whole)]
    (tmp_path / "fit").write_bytes(cut)
    with pytest.raises(FileError, match=r"not a checkpoint file, or it is truncated.*delete it, or pass another path"):
        fit(checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == cut


@pytest.mark.parametrize("share", [0.4, 0.7, 0.999])
def test_a_single_bit_is_seen(share: float, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    contents = bytearray((tmp_path / "fit").read_bytes())
    contents[int(share * len(contents))] ^= 1
    (tmp_path / "fit").write_bytes(contents)
    with pytest.raises(FileError, match=r"altered.*delete it, or pass another path"):
        fit(checkpoint=tmp_path / "fit")


@pytest.mark.parametrize("key", ["kind", "problem", "seed", "memory", "digest"])
def test_a_header_that_lacks_something_is_refused(key: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    tensors, header = io.read(tmp_path / "fit")
    del header[key]
    io.save(tmp_path / "fit", tensors, header)
    with pytest.raises(FileError, match=r"altered|not a checkpoint"):
        fit(checkpoint=tmp_path / "fit")


# written as a checkpoint is, checksums and all, by somebody who means no good
MADE_UP: dict[str, Callable[[dict[str, Any]], Any]] = {
    "problem": lambda header: header.update(problem=["model"]),
    "no problem": lambda header: header.update(problem=None),
    "seed": lambda header: header.update(seed="123"),
    "seed that is none": lambda header: header.update(seed=True),
    "memory": lambda header: header.update(memory=7),
    "memory of another kind": lambda header: header["memory"].update(limit="4GB"),
    "memory with more": lambda header: header["memory"].update(asked=1),
    "memory with less": lambda header: header["memory"].pop("host"),
    "halved backwards": lambda header: header["memory"].update(halvings=-1),
    "nothing to work with": lambda header: header["memory"].update(limit=-1),
}


@pytest.mark.parametrize("change", MADE_UP.values(), ids=MADE_UP)
def test_a_made_up_header_is_refused_and_the_file_kept(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    before = rewritten(tmp_path / "fit", lambda tensors, header: change(header)).read_bytes()
    with pytest.raises(FileError, match=r"was altered since it was written: delete it, or pass another path"):
        fit(checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before


FIELDS = [
    ("seed",), ("problem",), ("memory",), ("digest",), ("kind",), ("memory", "limit"), ("memory", "host"),
    ("memory", "halvings"), ("problem", "plan"), ("problem", "model"), ("problem", "parameters"), ("problem", "new"),
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(field=st.sampled_from(FIELDS), value=json_values)
@example(field=("memory", "halvings"), value=10**9)
@example(field=("memory", "limit"), value=1)
def test_a_field_of_any_json_is_refused_or_does_not_matter(
    field: tuple[str, ...], value: Any, begun: Path, uninterrupted: dict[str, Any]
) -> None:
    def change(_: Any, header: dict[str, Any]) -> None:
        inner = header if len(field) == 1 else header[field[0]]
        inner[field[-1]] = value

    path = rewritten(Path(shutil.copy(begun, begun.with_name("changed"))), change)
    try:
        posterior = fit(checkpoint=path)
    except FileError:
        assert path.exists()
    else:
        assert field == ("seed",) or torch.equal(posterior.directions, uninterrupted["Krylov"].directions)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a fit that has made no sweep yet."""
    path = tmp_path_factory.mktemp("begun") / "fit"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with contextlib.suppress(KeyboardInterrupt):
            fit(checkpoint=path, generator=seeded())
    return path


@pytest.mark.parametrize(("version", "advice"), [(99, "upgrade nullbayes"), (1, "fit and save again")])
def test_a_checkpoint_of_another_version_is_refused_and_kept(version: int, advice: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    before = rewritten(tmp_path / "fit", lambda _, header: header.update(format_version=version)).read_bytes()
    with pytest.raises(FileError, match=f"format version {version}.*{advice}.*To fit anew, delete it"):
        fit(checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.witness,)


def test_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    witness, path = tmp_path / "it ran", tmp_path / "fit"
    for contents in (pickle.dumps(Trap(witness)), pickle.dumps({"counts": Trap(witness)}, protocol=0)):
        path.write_bytes(contents)
        with pytest.raises(FileError, match="not a checkpoint file"):
            fit(checkpoint=path)
        assert path.read_bytes() == contents
    torch.save({"counts": Trap(witness)}, path)
    with pytest.raises(FileError, match="not a checkpoint file"):
        fit(checkpoint=path)
    assert left(tmp_path) == ["fit"]
    torch.load(path, weights_only=False)
    assert witness.exists()  # it would have


# --- nothing to store, nowhere to store it ----------------------------------------------------------------------------


class Own(Projector):
    """A projector of a user's, that knows nothing of stores."""

    rtol, atol = 1e-2, 0.0

    def prepare(self, rows: nb.Rows) -> Any:
        return ExactDual().prepare(rows)

    def apply(self, state: Any, noise: Tensor, *, callback: Any = None) -> Projection:
        return ExactDual().apply(state, noise, callback=callback)


@pytest.mark.parametrize(
    "projector",
    [ExactDual(), ExactPrimal(), Lanczos(rank=36), "auto", Own()],
    ids=lambda value: str(value).split("(")[0].split(" ")[0],
)
def test_a_direct_projector_leaves_no_file(projector: Any, tmp_path: Path) -> None:
    posterior = fit(projector, generator=seeded(), checkpoint=tmp_path / "fit")
    assert left(tmp_path) == []
    assert torch.equal(posterior.directions, fit(projector, generator=seeded()).directions)


@pytest.mark.parametrize("where", ["missing/fit", "file/fit", "folder"])
def test_a_place_that_cannot_be_written_to_is_named_before_any_work(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(Krylov, "prepare", lambda *_: pytest.fail("work was done"))
    with pytest.raises(FileError, match=f"The checkpoint could not be written to .*{where}"):
        fit(checkpoint=tmp_path / where)
    assert left(tmp_path) == ["file", "folder"]


def test_a_disk_that_is_full_later_is_a_warning(tmp_path: Path) -> None:
    """Files may not grow beyond 4 kB for a moment: the first one does not, those with sweeps in them do."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.warns(NullBayesWarning, match="checkpoint could not be written.*The fit goes on"):
            posterior = fit(checkpoint=tmp_path / "fit", generator=seeded())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(posterior.directions, fit(generator=seeded()).directions)
    assert left(tmp_path) == []


def test_a_fit_that_fails_before_its_first_sweep_leaves_nothing(tmp_path: Path) -> None:
    calls = iter(range(10))

    def broken(n: int, generator: torch.Generator) -> Tensor:
        return randn(n if next(calls) == 0 else 1, 51, generator=seeded())

    with pytest.raises(SettingsError, match="gave shape"):
        fit(base=broken, checkpoint=tmp_path / "fit")
    assert left(tmp_path) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    names = ["fit.old", ".fit.old", ".fit.abc", ".fits.abcdefgh", "posterior"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".fit.12345678").write_text("a file, no folder of ours")
    fit(checkpoint=tmp_path / "fit")
    assert left(tmp_path) == sorted([*names, ".fit.12345678"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(killed(Path(sys.argv[1]))))
