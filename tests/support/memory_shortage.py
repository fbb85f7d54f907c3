"""What it takes to run out of memory: too little address space, and networks that ask for more than there is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from support.models import CLASSIFICATION, MLP

MIB = 2**20

on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs limits of the address space")


def problem(device: str = "cpu") -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """2,500 rows of 26,122 parameters."""
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(128, 10)).to(device)
    return model, [(torch.randn(250, 64).to(device), torch.randint(0, 10, (250,)).to(device))]


def fit_with_projector(model: nn.Module, data: Any, projector: Any, **options: Any) -> Any:
    generator, n = torch.Generator().manual_seed(0), options.pop("n_samples", 8)
    posterior = options.pop("kind", nb.ProjectedPosterior)(model, prior_precision=1.0)
    return posterior.fit(data, n, projector=projector, tolerance=0.1, generator=generator, progress=False, **options)


def starve(mib: int) -> None:
    import resource

    lines = Path("/proc/self/status").read_text().splitlines()
    used = int(next(line for line in lines if line.startswith("VmSize")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * MIB, resource.RLIM_INFINITY))


def fed() -> None:
    """Take back the limit."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def forked(work: Callable[[], None]) -> int:
    """Work in a copy of this process; return how that ended."""
    if not (child := os.fork()):
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def in_a_process(file: str, *arguments: str) -> str:
    variables = {  # one arena: what others keep in reserve would be taken beyond the limit
        "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, file, *arguments],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Hungry(nn.Module):
    """A network that asks for more memory than there is, the so many-th time it is called, and only then."""

    calls, fails_at = 0, range(0)  # of the class: the library works with a copy of the network

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.build()

    def forward(self, x: Tensor) -> Tensor:
        Hungry.calls += 1
        if Hungry.calls in Hungry.fails_at:
            torch.empty(2**58, dtype=torch.uint8)
        return self.inner(x)

    def failing_at(self, call: int, times: int = 1) -> Hungry:
        Hungry.calls, Hungry.fails_at = 0, range(call, call + times)
        return self


class Plain(Hungry):
    """The same, by a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


DATA = [CLASSIFICATION.data(n=6)]
