"""Where a checkpoint is written, and where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError, NullBayesWarning, SettingsError
from nullbayes.posteriors import checkpoint
from nullbayes.projectors import ExactDual, ExactPrimal, Krylov, Lanczos, Projection, Projector
from support.checkpoint_fits import fit_in_sweeps, left, seeded
from support.drawing import randn

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),
    pytest.mark.usefixtures("at_every_sweep"),
]


def test_no_checkpoint_is_written_before_its_interval_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 3600.0)
    written, save = list[int](), io.save
    monkeypatch.setattr(io, "save", lambda path, contents, *args, **kwargs: (
        written.append(len(contents)), save(path, contents, *args, **kwargs)
    ))  # fmt: skip
    fit_in_sweeps(checkpoint=tmp_path / "fit")
    assert written == [0]  # before the first sweep, to see that it can be done


class Own(Projector):
    """A projector of a user's, that ignores stores."""

    rtol, atol = 1e-2, 0.0

    def _prepare(self, rows: nb.Rows) -> Any:
        return ExactDual().prepare(rows)

    def _apply(self, state: Any, noise: Tensor, callback: Any, store: Any) -> Projection:
        return ExactDual().apply(state, noise, callback=callback)


@pytest.mark.parametrize(
    "projector",
    [ExactDual(), ExactPrimal(), Lanczos(rank=36), "auto", Own()],
    ids=lambda value: str(value).split("(")[0].split(" ")[0],
)
def test_a_direct_projector_leaves_no_file(projector: Any, tmp_path: Path) -> None:
    posterior = fit_in_sweeps(projector, generator=seeded(), checkpoint=tmp_path / "fit")
    assert left(tmp_path) == []
    assert torch.equal(posterior.directions, fit_in_sweeps(projector, generator=seeded()).directions)


@pytest.mark.parametrize("where", ["missing/fit", "file/fit", "folder"])
def test_a_path_that_cannot_be_written_to_is_refused_before_any_work(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(Krylov, "prepare", lambda *_: pytest.fail("work was done"))
    with pytest.raises(FileError, match=f"The checkpoint could not be written to .*{where}"):
        fit_in_sweeps(checkpoint=tmp_path / where)
    assert left(tmp_path) == ["file", "folder"]


def test_a_disk_that_fills_up_later_causes_a_warning(tmp_path: Path) -> None:
    """Files may not grow beyond 4 kB for a moment: the first one does not, those with sweeps in them do."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.warns(NullBayesWarning, match="checkpoint could not be written.*The fit goes on"):
            posterior = fit_in_sweeps(checkpoint=tmp_path / "fit", generator=seeded())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(posterior.directions, fit_in_sweeps(generator=seeded()).directions)
    assert left(tmp_path) == []


def test_a_fit_that_fails_before_its_first_sweep_leaves_nothing(tmp_path: Path) -> None:
    calls = iter(range(10))

    def broken(n: int, generator: torch.Generator) -> Tensor:
        return randn(n if next(calls) == 0 else 1, 51, generator=seeded())

    with pytest.raises(SettingsError, match="gave shape"):
        fit_in_sweeps(base=broken, checkpoint=tmp_path / "fit")
    assert left(tmp_path) == []


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    names = ["fit.old", ".fit.old", ".fit.abc", ".fits.abcdefgh", "posterior"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".fit.12345678").write_text("a file, no folder of ours")
    fit_in_sweeps(checkpoint=tmp_path / "fit")
    assert left(tmp_path) == sorted([*names, ".fit.12345678"])
