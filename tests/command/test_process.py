"""The command as a process: an exit code, no traceback, and no progress bar in a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import ENVIRONMENT
from support.user_folder import example

pytestmark = pytest.mark.cpu


def test_a_pipe_has_no_progress_bar_and_a_failure_no_traceback(story: Path) -> None:
    words = example("fit")
    words[words.index("own:held_out")] = "own:train"  # which is known behind the fit
    words[-1:] = ["never.safetensors", "--no-tune"]
    command = [sys.executable, "-P", "-m", "nullbayes", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=story, env=ENVIRONMENT)
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "Calibrating with held-out data."
    assert last.startswith("nullbayes: 48 of the 48 held-out inputs are training data")
    assert "\r" not in done.stderr
    assert not done.stdout
    assert not (story / "never.safetensors").exists()
