"""Saving leaves the earlier file or the new one, whole, whatever the disk, the system or another process does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError
from support.models import MLP
from support.posterior_fits import fit_mlp
from support.processes import python

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share what they have computed")


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def test_saving_replaces_what_was_there(saved: Path) -> None:
    posterior = fit_mlp(n_samples=6)
    posterior.save(str(saved))
    assert nb.load(saved, MLP.build()).n_samples == 6
    assert list(contents(saved.parent)) == [saved.name]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    fit_mlp().save(tmp_path / ("n" * 255))
    assert [len(name) for name in contents(tmp_path)] == [255]


def test_a_saved_file_can_be_read_by_those_who_may_read_new_files(tmp_path: Path) -> None:
    (plain := tmp_path / "plain").touch()
    fit_mlp().save(tmp_path / "posterior")
    assert (tmp_path / "posterior").stat().st_mode == plain.stat().st_mode


# --- obstacles --------------------------------------------------------------------------------------------------------


OBSTACLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing folder": (lambda folder: None, "missing/file"),
    "a file for a folder": (lambda folder: None, "posterior.safetensors/file"),
    "a folder": (lambda folder: (folder / "obstacle").mkdir(), "obstacle"),
    "a pipe": (lambda folder: os.mkfifo(folder / "obstacle"), "obstacle"),
    "a link to a folder": (lambda folder: (folder / "obstacle").symlink_to(folder), "obstacle"),
    "a link into nowhere": (lambda folder: (folder / "obstacle").symlink_to("missing/file"), "obstacle"),
    "a name that is too long": (lambda folder: None, "n" * 300),
    "a name that is none": (lambda folder: None, "nul\0"),
}


@pytest.mark.parametrize(("place", "name"), OBSTACLES.values(), ids=OBSTACLES)
def test_a_path_that_cannot_be_replaced_is_named_and_left_alone(
    place: Callable[[Path], object], name: str, saved: Path
) -> None:
    place(saved.parent)
    before, kind = contents(saved.parent), (saved.parent / "obstacle").is_fifo()
    with pytest.raises(FileError, match=r"could not be written to .*: .*Choose another place"):
        fit_mlp().save(saved.parent / name)
    assert contents(saved.parent) == before
    assert (saved.parent / "obstacle").is_fifo() is kind


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path, folder = re.escape(str(tmp_path / "none" / "a.safetensors")), re.escape(str(tmp_path / "none"))
    with pytest.raises(FileError, match=rf"could not be written to {path}: there is no folder {folder}\. Choose"):
        fit_mlp().save(tmp_path / "none" / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root can write to")
def test_a_folder_that_cannot_be_written_to_is_named() -> None:
    with pytest.raises(FileError, match=r"could not be written to /proc/self/posterior"):
        fit_mlp().save("/proc/self/posterior")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_is_named(saved: Path) -> None:
    before = contents(saved.parent)
    saved.parent.chmod(0o500)
    try:
        with pytest.raises(FileError, match="could not be written"):
            fit_mlp().save(saved)
    finally:
        saved.parent.chmod(0o700)
    assert contents(saved.parent) == before


def test_a_header_that_is_no_json_leaves_the_earlier_file(saved: Path) -> None:
    before = contents(saved.parent)
    for value in (object(), float("nan"), {1: {2}}):
        with pytest.raises(FileError, match="could not be written"):
            io.save(saved, {}, {"value": value})
    assert contents(saved.parent) == before


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_stays_and_the_file_behind_it_is_replaced(saved: Path) -> None:
    (elsewhere := saved.parent / "elsewhere").mkdir()
    link = elsewhere / "link"
    link.symlink_to("../posterior.safetensors")
    fit_mlp(n_samples=6).save(link)
    assert link.is_symlink()
    assert not saved.is_symlink()
    assert nb.load(saved, MLP.build()).n_samples == nb.load(link, MLP.build()).n_samples == 6
    assert list(contents(elsewhere)) == ["link"]


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("posterior")
    fit_mlp().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "posterior").is_file()


# --- power ------------------------------------------------------------------------------------------------------------


def test_save_syncs_the_file_then_renames_it_then_syncs_the_folder(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, fsync, replace = [], os.fsync, os.replace
    where = Path("/proc/self/fd")

    def spying_fsync(descriptor: int) -> None:
        fsync(descriptor)
        real = os.readlink(where / str(descriptor)) if where.is_dir() else ""
        steps.append(("fsync", Path(real).is_dir(), Path(real)))

    def spying_replace(source: Path, target: Path) -> None:
        steps.append(("replace", source, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spying_fsync)
    monkeypatch.setattr(os, "replace", spying_replace)
    fit_mlp().save(saved)
    assert [step[0] for step in steps] == ["fsync", "replace", "fsync"]
    if where.is_dir():
        assert steps[0][2] == steps[1][1]  # what is renamed
        assert steps[2][1:] == (True, saved.parent)


# --- other processes --------------------------------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys
from nullbayes import io
import torch

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tensors = {"directions": torch.ones(100_000)}
for limit in (0, 1, 100, 2048, 200_000, 400_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        io.save(sys.argv[1], tensors, {})
        print("written")
    except Exception as error:
        print(type(error).__name__, error)
"""


@needs_fork
def test_a_full_disk_leaves_the_earlier_file(saved: Path) -> None:
    """Files may not grow beyond some bytes: writing breaks off at the start, in the middle, and at the end."""
    before = contents(saved.parent)
    answers = python("-c", FULL_DISK, saved, cwd=saved.parent).splitlines()
    assert len(answers) == 6
    assert all(answer.startswith("FileError The posterior could not be written") for answer in answers)
    assert contents(saved.parent) == before


KILLED = """
import os, resource, signal, sys
import torch
from nullbayes import io

path, before = sys.argv[1], open(sys.argv[1], "rb").read()
tensors = {"directions": torch.ones(200_000)}
io.save(path + ".new", tensors, {})
new = open(path + ".new", "rb").read()


def killed(prepare, argument):
    with open(path, "wb") as file:
        file.write(before)
    child = os.fork()
    if child == 0:
        prepare(argument)
        io.save(path, tensors, {})
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = open(path, "rb").read()
    assert found in (before, new), f"neither the old file nor the new one: {prepare.__name__}({argument})"
    assert status == 0 or os.WIFSIGNALED(status)
    return status != 0, found == new


def at_step(number):  # before the step that Python tells of
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        seen += event.partition(".")[0] in ("open", "os", "tempfile", "shutil")
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def at_byte(number):  # in the middle of writing, by the system
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))


results = [killed(at_step, 1)]
while results[-1][0]:
    results.append(killed(at_step, len(results) + 1))
assert results[0] == (True, False) and results[-1] == (False, True)
for number in (0, 1, 1000, 400_000, len(new) - 1):
    assert killed(at_byte, number) == (True, False)
assert killed(at_byte, len(new)) == (False, True)
print(len(results))
"""


@needs_fork
def test_a_process_killed_while_saving_leaves_the_earlier_file_or_the_new_one(saved: Path) -> None:
    assert int(python("-c", KILLED, saved, cwd=saved.parent)) > 5


RACE = """
import os, sys
import torch
from nullbayes import io

path = sys.argv[1]
children = []
for value in (1.0, 2.0):
    child = os.fork()
    if child == 0:
        for _ in range(25):
            io.save(path, {"directions": torch.full((50_000,), value)}, {"value": value})
        os._exit(0)
    children.append(child)
seen = set()
while children:
    child, status = os.waitpid(-1, os.WNOHANG)
    if child:
        assert status == 0
        children.remove(child)
    if os.path.exists(path):
        tensors, header = io.read(path)
        assert (tensors["directions"] == header["value"]).all()
        seen.add(header["value"])
print(len(seen), os.listdir(os.path.dirname(path)))
"""


@needs_fork
@pytest.mark.slow
def test_two_processes_that_save_to_one_path_leave_one_whole_file(tmp_path: Path) -> None:
    assert python("-c", RACE, tmp_path / "file", cwd=tmp_path) == "2 ['file']\n"
