"""What goes wrong in one process ends all of them, with one message; a run that was killed continues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nullbayes.projectors import Projector
from support.joint_fits import BLOCKS, bad_input, data, killed, posterior, resumed, trouble
from support.together import DIED, together

pytestmark = pytest.mark.cpu


def test_an_error_of_one_process_is_raised_by_all() -> None:
    first, last = together(bad_input, 2)
    assert first["nan"].startswith("DataError: Process 1: Batch 0 holds NaN or Inf in its inputs")
    assert last["nan"].startswith("DataError: Batch 0 holds NaN or Inf in its inputs")
    assert first["bug"] == "ZeroDivisionError: division by zero"
    assert last["bug"] == "DistributedError: Process 0 failed with ZeroDivisionError: division by zero"
    for found in (first, last):
        torch.testing.assert_close(found["after"], data()[0], msg="the processes still understand each other")


@pytest.mark.slow
def test_processes_that_differ_are_told_so_and_memory_of_one_is_memory_of_all() -> None:
    for found in together(trouble, 2):
        assert "The processes have examples of different forms" in found["wide"]
        torch.testing.assert_close(found["after"], posterior("outputs").directions, rtol=1e-5, atol=1e-6)
        assert "must make the same calls" in found["apart"]
        assert found["memory"]["calls"] == 2
        assert "memory ran out" in found["memory"]["notes"][0]
        expected = posterior("outputs", projector=BLOCKS).directions
        torch.testing.assert_close(found["memory"]["directions"], expected, rtol=1e-5, atol=1e-6)


def check_killed(folder: Path, parallel: str, n: int, then: int, projector: str | Projector = BLOCKS) -> None:
    """One of n processes is killed; so many others continue, one of them in this process."""
    *survivors, dead = together(killed, n, str(folder), parallel, projector)
    assert dead == DIED
    for survivor in survivors:
        assert survivor["said"].startswith("ProcessLostError: Another process of this run no longer answers")
        assert survivor["seconds"] < 20.0
    assert (folder / "fit").is_file()
    again = (
        [resumed(0, str(folder), parallel, projector)]
        if then == 1
        else together(resumed, then, str(folder), parallel, projector)
    )
    expected = posterior("outputs", projector=BLOCKS, parallel="samples" if parallel == "samples" else None)
    for found in again:
        assert parallel == "samples" or found["sweeps"][0] > 1, "it begins where the file is"
        torch.testing.assert_close(found["directions"], expected.directions, rtol=1e-5, atol=1e-6)
        assert parallel == "data" or torch.equal(found["directions"], expected.directions)
    assert [path.name for path in folder.iterdir()] == ["killed"], "the files are removed at the end"


def test_a_killed_process_stops_the_others_and_one_process_continues(tmp_path: Path) -> None:
    check_killed(tmp_path, "data", 2, 1)


@pytest.mark.slow
def test_another_number_of_processes_continues_with_a_plan_of_its_own(tmp_path: Path) -> None:
    check_killed(tmp_path, "data", 2, 1, "auto")


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "n", "then"), [("data", 2, 2), ("data", 4, 2), ("samples", 2, 1)])
def test_a_killed_run_is_continued_by_as_many_processes_or_fewer(
    tmp_path: Path, parallel: str, n: int, then: int
) -> None:
    check_killed(tmp_path, parallel, n, then)
