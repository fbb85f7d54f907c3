"""What goes wrong in one process ends all of them, with one message; a run that was killed continues."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.joint_fits import BLOCKS, killed, posterior, resumed, trouble
from support.together import DIED, together

pytestmark = pytest.mark.cpu


@cache
def troubled() -> list[Any]:
    return together(trouble, 2)


def test_an_error_of_one_process_is_raised_by_all() -> None:
    first, last = troubled()
    for name, said in {
        "nan": "holds NaN or Inf in its inputs",
        "wide": "The processes have examples of different forms",
    }.items():
        assert said in first[name]
        assert said in last[name]
    assert first["nan"].startswith("DataError: Process 1: Batch 0")
    assert last["nan"].startswith("DataError: Batch 0")
    assert last["bug"] == "DistributedError: Process 0 failed with ZeroDivisionError: division by zero"
    for found in (first, last):
        torch.testing.assert_close(found["after"], posterior("outputs").directions, rtol=1e-5, atol=1e-6)
        assert "must make the same calls" in found["apart"]


def test_memory_that_runs_out_in_one_process_makes_all_plan_again() -> None:
    for found in (outcome["memory"] for outcome in troubled()):
        assert found["calls"] == 2
        assert "memory ran out" in found["notes"][0]
        expected = posterior("outputs", projector=BLOCKS).directions
        torch.testing.assert_close(found["directions"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parallel", ["data", pytest.param("samples", marks=pytest.mark.slow)])
def test_a_killed_process_stops_the_others_and_the_run_continues(tmp_path: Path, parallel: str) -> None:
    survivor, dead = together(killed, 2, str(tmp_path), parallel)
    assert dead == DIED
    assert survivor["said"].startswith("ProcessLostError: Another process of this run no longer answers")
    assert survivor["seconds"] < 20.0
    assert (tmp_path / "fit").is_file()
    expected = posterior("outputs", projector=BLOCKS, parallel="samples" if parallel == "samples" else None)
    # samples can be continued by another number of processes: here by this one alone
    again = (
        together(resumed, 2, str(tmp_path), parallel) if parallel == "data" else [resumed(0, str(tmp_path), parallel)]
    )
    for directions in again:
        torch.testing.assert_close(directions, expected.directions, rtol=1e-5, atol=1e-6)
    assert parallel == "data" or torch.equal(again[0], expected.directions)
    assert [path.name for path in tmp_path.iterdir()] == ["killed"], "the files are removed at the end"
