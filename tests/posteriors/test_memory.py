"""A fit keeps to its memory limit, and its plan says beforehand what it will take: bytes and operations.

On a CPU every fit has a process of its own, and what counts is the high-water mark of its resident memory over what it
had when the fit began; the allocator is told to give back what is freed (glibc else keeps tens of MiB for later).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nullbayes as nb
from nullbayes.errors import SettingsError
from nullbayes.limits import rates_of
from nullbayes.linalg import spectral
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, auto, candidates, sweep

MIB = 2**20
OWN = 4 * MIB  # what the process itself takes while it works: Python's objects, library buffers

# network, examples, rows, samples, limit in MiB, and how the rows should then be stored
FITS = {
    "all fits, eigenvectors": ("lenet", 45, "output", 4, 1000, "device"),
    "hardly fits, eigenvectors": ("lenet", 45, "output", 4, 22, "device"),
    "gradients of losses": ("lenet", 300, "loss", 4, 30, "device"),
    "one block": ("mlp", 200, "output", 8, 1000, "device"),
    "smaller blocks": ("mlp", 200, "output", 8, 18, "device"),
    "many samples": ("mlp", 150, "output", 30, 40, "device"),
    "half precision": ("lenet", 120, "output", 4, 21, "half"),
    "factors": ("cnn", 120, "output", 4, 18, "factors"),
    "formed in passing": ("lenet", 120, "output", 4, 15, "recompute"),
    "normal matrix": ("small", 2400, "output", 30, 40, "device"),
    "few parameters": ("tiny", 300, "output", 10, 25, "device"),
}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    def perceptron(inputs: int, width: int) -> nn.Module:
        hidden = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    torch.manual_seed(0)
    if name == "lenet":
        first = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh()]
        last = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh()]
        return nn.Sequential(*first, *last, nn.Linear(84, 10)), (1, 28, 28)
    if name == "cnn":
        first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)]
        return nn.Sequential(*first, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10)), (1, 12, 12)
    sizes = {"mlp": (64, 128), "middle": (30, 60), "small": (30, 24), "tiny": (10, 12)}[name]
    return perceptron(*sizes), sizes[:1]


def problem(name: str, n: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model, shape = network(name)
    x, y = torch.randn(n, *shape), torch.randint(0, 10, (n,))
    return model, [(x[i : i + 64], y[i : i + 64]) for i in range(0, n, 64)]


def measure(name: str, n: int, kind: str, n_samples: int, limit: int, device: str = "cpu") -> dict[str, Any]:
    """Plan, then fit and measure; in a process of its own."""
    model, data = problem(name, n)
    model, data = model.to(device), [(x.to(device), y.to(device)) for x, y in data]
    options: dict[str, Any] = {"n_samples": n_samples, "memory_limit": limit, "tolerance": 0.1}
    posterior_type = nb.ProjectedPosterior if kind == "output" else nb.LossProjectedPosterior
    few = [(data[0][0][:4], data[0][1][:4])]
    for projector in ("auto", nb.projectors.Krylov()):  # let libraries load
        posterior_type(model, prior_precision=1.0).fit(few, 2, projector=projector, progress=False)
    nb.OutputJacobian(model, few, storage="matrix_free").block(0, 10).gram(torch.float64)
    plan = nb.plan(model, data, loss=kind == "loss", **options)
    posterior = posterior_type(model, prior_precision=1.0)
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before = resident("VmRSS")
    posterior.fit(data, progress=False, **options)  # begins by forgetting the earlier peak
    peak = (torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")) - before
    return {"peak": peak, "predicted": plan.peak_bytes, "limit": limit, "storage": plan.storage, "reason": plan.reason}


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measured_apart(*arguments: Any) -> dict[str, Any]:
    variables = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(arguments)],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], own: int) -> None:
    assert found["peak"] <= 1.2 * found["limit"] + own
    assert found["predicted"] <= found["limit"]
    assert found["peak"] <= 1.5 * found["predicted"] + own
    assert found["predicted"] <= 1.5 * found["peak"] + own


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")


QUICKER = ("one block", "few parameters")  # which stand for the others in `make test`


@needs_proc
@pytest.mark.parametrize(
    "case", [name if name in QUICKER else pytest.param(name, marks=pytest.mark.slow) for name in FITS]
)
def test_fit_keeps_to_its_limit_and_to_its_plan(case: str) -> None:
    name, n, kind, n_samples, limit, storage = FITS[case]
    found = measured_apart(name, n, kind, n_samples, limit * MIB)
    assert found["storage"] == storage
    assert ("normal matrix" in found["reason"]) == (case == "normal matrix")
    check(found, OWN)


@needs_proc
@pytest.mark.slow
def test_vectors_as_long_as_the_rows_are_many_are_counted() -> None:
    """Conjugate gradients over all rows hold some for each sample, and rows are almost as many as parameters."""
    found = measured_apart("middle", 600, "output", 300, 200 * MIB)
    assert "combinations of them" in found["reason"]
    assert found["peak"] <= 1.1 * found["predicted"] + OWN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "n", "kind", "limit"),
    [("lenet", 2000, "output", 20_000), ("lenet", 2000, "output", 1500), ("lenet", 2000, "loss", 600)],
)
def test_fit_keeps_to_its_limit_on_a_gpu(name: str, n: int, kind: str, limit: int) -> None:
    check(measured_apart(name, n, kind, 10, limit * MIB, "cuda"), 32 * MIB)  # workspaces of cuBLAS


@needs_proc
@pytest.mark.cpu
@pytest.mark.slow
def test_refusal_names_the_least_limit_and_that_limit_works() -> None:
    model, data = problem("lenet", 30)
    with pytest.raises(SettingsError, match="the least that would do is") as refused:
        nb.plan(model, data, n_samples=10, memory_limit=2 * MIB, tolerance=0.1)
    named = re.search(r"least that would do is (\d+) MiB", str(refused.value))
    assert named is not None
    least = int(named[1])
    with pytest.raises(SettingsError, match=rf"least that would do is {least} MiB"):
        nb.plan(model, data, n_samples=10, memory_limit=(least - 1) * MIB, tolerance=0.1)
    found = measured_apart("lenet", 30, "output", 10, least * MIB)
    assert found["peak"] <= 1.2 * found["limit"] + OWN


# --- work -------------------------------------------------------------------------------------------------------------


def added_product(_sum: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Products that torch does not count: those in place, and those of halves, which name the type of their sum."""
    return int(2 * left[0] * left[1] * right[1])


ADDED = {torch.ops.aten.addmm_: added_product, torch.ops.aten.addmm: added_product}


@pytest.mark.parametrize(
    ("name", "n", "kind", "method"),
    [
        ("lenet", 30, "output", ExactDual),
        ("lenet", 100, "loss", ExactDual),
        ("tiny", 200, "output", ExactPrimal),
        ("small", 250, "output", Alternating),
        ("mlp", 250, "output", Krylov),
        ("cnn", 150, "output", Krylov),
    ],
)
def test_planned_operations_match_the_operations_done(name: str, n: int, kind: str, method: type) -> None:
    check_operations(name, n, kind, method)


def test_planned_operations_count_products_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor in float32, as on a GPU, whatever the device is: three products for one."""
    for module in (auto, candidates, spectral):
        monkeypatch.setattr(module, "half_is_fast", lambda _: True)
    monkeypatch.setattr(sweep, "double_is_fast", lambda _: False)
    for module in (auto, candidates):
        monkeypatch.setattr(module, "rates_of", lambda device: replace(rates_of(device), narrow=1e13))
    halves = check_operations("cnn", 150, "output", Krylov)
    monkeypatch.undo()
    assert halves.operations > 1.02 * check_operations("cnn", 150, "output", Krylov).operations


def check_operations(name: str, n: int, kind: str, method: type) -> Any:
    model, data = problem(name, n)
    plan = nb.plan(model, data, n_samples=20, memory_limit="4GB", loss=kind == "loss", tolerance=0.1)
    assert (type(plan.projector), plan.storage) == (method, "device")
    opened = (nb.OutputJacobian if kind == "output" else nb.LossJacobian)(model, data)
    rows, noise = opened.keep(), torch.randn(20, opened.n_columns)
    with FlopCounterMode(display=False, custom_mapping=ADDED) as counter:
        state: Any = plan.projector.prepare(rows)
        if isinstance(plan.projector, Krylov):
            state.parallel_sweep(noise)
            if rows.n_rows > rows.n_columns:  # a step does without the rows, the residual does not
                rows.mv(noise), rows.mv(noise)
        elif isinstance(plan.projector, Alternating):
            state.sequential_sweep(noise)
        elif isinstance(plan.projector, ExactDual):
            state.correction(noise)
        else:
            rows.mv(noise), rows.mv(noise)
            state.correction(noise)
    done = counter.get_total_flops()
    if isinstance(
        plan.projector, ExactDual | ExactPrimal
    ):  # Cholesky factors and solves consist of products, eigenvectors do not
        done += 9 * min(rows.n_rows, rows.n_columns) ** 3
    assert plan.operations / 1.5 <= done <= 1.5 * plan.operations
    return plan


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
