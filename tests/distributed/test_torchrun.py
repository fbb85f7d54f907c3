"""``torchrun -m nullbayes fit`` writes the posterior that one process writes, and says everything once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.processes import ENVIRONMENT
from support.user_folder import OWN, imported

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

FIT = ["-m", "nullbayes", "fit", "--model", "own:build", "--weights", "own.pt", "--data", "own:train"]


def run(folder: Path, *words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *words]
    env = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    torch.save(imported(tmp_path / "own.py").build().state_dict(), tmp_path / "own.pt")
    return tmp_path


@pytest.mark.parametrize("parallel", ["data", "parameters"])
def test_two_processes_write_the_posterior_of_one(folder: Path, parallel: str) -> None:
    one = run(folder, *FIT, "-o", "one.safetensors")
    two = run(folder, *FIT, "-o", "two.safetensors", "--parallel", parallel, processes=2)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert two.stdout.count("projector") == one.stdout.count("projector")
    assert two.stderr.count("The posterior is in two.safetensors") == 1
    alone, together = (load_file(folder / f"{name}.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_a_refusal_is_said_once(folder: Path) -> None:
    (folder / "bad.py").write_text(
        "import os, own\n"
        "def train():\n"
        "    x, y = own.some(48, 0)\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        x[47] = float('nan')\n"
        "    return x, y\n"
    )
    done = run(folder, *FIT[:-1], "bad:train", "-o", "never.safetensors", processes=2)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("nullbayes: "))
    assert line.startswith("nullbayes: Process 1: Batch 0 holds NaN or Inf")
    assert not (folder / "never.safetensors").exists()
