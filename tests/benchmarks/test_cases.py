"""The benchmarks, small: every case runs and hands back what it should, and the rival is what it claims to be."""

from __future__ import annotations

import ast
import gzip
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.testing import kernel_projector

FOLDER = Path(__file__).parents[2] / "benchmarks"
runner = importlib.import_module("benchmarks.run")
MODULES = ("measure", "problems", "published")
measure, problems, published = (importlib.import_module(f"benchmarks.{name}") for name in MODULES)
CPU = torch.device("cpu")
ENVIRONMENT = {"python", "torch", "nullbayes", "commit", "device", "device_name", "threads", "default_dtype", "date"}
FIELDS = {"case", "claim", "size", "seed", "options", "rows", "ratios", "holds", "notes", "seconds", "warnings"}


def write_idx(path: Path, values: Tensor) -> None:
    """Write bytes in the format in which MNIST and its kin are distributed."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.numpy().tobytes()))


@pytest.fixture(scope="module")
def data(ordinary_default: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files in the formats of the real ones."""
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    for name in ("fashion-mnist", "mnist"):
        for split in ("train", "t10k"):
            images = torch.randint(256, (60, 28, 28), generator=generator, dtype=torch.uint8, device="cpu")
            write_idx(folder / name / f"{split}-images-idx3-ubyte.gz", images)
            write_idx(folder / name / f"{split}-labels-idx1-ubyte.gz", torch.arange(60).to(torch.uint8) % 10)
    return folder


def numbers(value: Any) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        return [n for part in value.values() for n in numbers(part)]
    if isinstance(value, list):
        return [n for part in value for n in numbers(part)]
    return [float(value)] if isinstance(value, (int, float)) else []


# --- the cases ------------------------------------------------------------------------------------------------------


SLOWER = (
    "detection", "intervals", "latency", "lenet_fashion_mnist", "memory", "processes", "promise", "small_networks",
    "streaming", "sweep_growth", "time_to_residual", "torchrun",
)  # fmt: skip


@pytest.mark.parametrize("name", runner.case_names())
def test_case_is_complete(name: str) -> None:
    case = runner.load_case(name)
    claim, blank = (case.__doc__ or "").splitlines()[:2]
    assert claim.endswith(".")
    assert not blank
    assert case.SMALL.keys() == case.FULL.keys() >= getattr(case, "CUDA", {}).keys()
    assert runner.options_of(case, "full", torch.device("cuda"), {}) == case.FULL | getattr(case, "CUDA", {})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOWER else n for n in runner.case_names()]
)
def test_case_runs_small(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    runner.execute([name], device=pytestconfig.getoption("--device"), data=data, json_file=tmp_path / "result.json")
    results = json.loads((tmp_path / "result.json").read_text())
    (record,) = results["cases"]
    assert results["format"] == runner.FORMAT
    assert results["environment"].keys() >= ENVIRONMENT
    assert record.keys() >= FIELDS
    assert (record["case"], record["size"], record["skipped"]) == (name, "small", None)
    assert record["rows"]
    assert any(ratio is not None and ratio > 0 for ratio in record["ratios"].values())
    assert all(math.isfinite(number) for number in numbers([record["rows"], record["ratios"]]))
    printed = capsys.readouterr().out
    assert all(ratio in printed for ratio in record["ratios"])
    assert " ".join(record["claim"].split()) in " ".join(printed.split())


def test_time_to_residual_falls_back_on_digits_and_says_when_a_ratio_is_a_lower_bound() -> None:
    overrides = {"budget": "0", "tolerance": "1e-3", "rows": "loss"}
    record = runner.run_case("time_to_residual", size="small", device=CPU, data=None, seed=0, overrides=overrides)
    library, other = record["rows"]
    assert "digits" in record["notes"][0]
    assert library["reached"]
    assert not other["reached"]
    assert record["ratios"]["loss"] == other["seconds"] / library["seconds"]
    assert "lower bound" in record["notes"][1]


def test_latency_is_judged_by_three_passes_and_two_milliseconds() -> None:
    overrides = {"networks": "batchnorm_cnn"}
    record = runner.run_case("latency", size="small", device=CPU, data=None, seed=0, overrides=overrides)
    (row,) = record["rows"]
    assert row["bound_ms"] == pytest.approx(3 * row["forward_ms"] + 2)
    assert row["holds"] == (max(row["predict_ms"], row["ood_score_ms"]) <= row["bound_ms"])
    assert record["ratios"]["predict/bound, batchnorm_cnn"] == pytest.approx(row["predict_ms"] / row["bound_ms"])


def test_memory_of_a_fit_is_measured_where_the_system_tells_it() -> None:
    if measure.resident_bytes("VmHWM") is None:
        pytest.skip("this system does not tell")
    with measure.Peak(CPU) as peak:
        taken = torch.ones(2**24)  # 64 MiB: too large to be taken from what was freed before
    assert peak.bytes is not None
    assert peak.bytes >= 0.9 * taken.nbytes


def test_memory_limit_too_small_to_work_with_counts_as_refused() -> None:
    case = runner.load_case("memory")
    found = case.measure({**case.SMALL, "limit": 1000, "device": "cpu", "seed": 0})
    assert "memory limit" in found["refused"]
    assert found["peak_mib"] is None


def test_missing_data_are_reported_and_stop_no_other_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["lenet_fashion_mnist", "--data", "nowhere"]) == 1
    assert "--data FOLDER" in capsys.readouterr().out


# --- the published algorithm ----------------------------------------------------------------------------------------


def network() -> tuple[nn.Module, Tensor, Tensor]:
    """A network in float64 whose rows are well conditioned; 20 examples are one block of 16 and a tail."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    return model, torch.randn(20, 400).double() / 20, torch.arange(20) % 2


@pytest.mark.parametrize("kind", [nb.OutputJacobian, nb.LossJacobian])
def test_published_algorithm_tends_to_the_exact_projection(kind: type[nb.OutputJacobian]) -> None:
    model, x, y = network()
    sweeps = published.PublishedSweeps(kind, model, x, y)
    assert [stop - start for start, stop in sweeps.cuts] == [
        16 * sweeps.rows.rows_per_example,
        4 * sweeps.rows.rows_per_example,
    ]
    noise = torch.randn(3, sweeps.rows.n_columns).double()
    done = published.run_until(sweeps, noise, tolerance=1e-8, budget=600.0)
    assert done.reached
    assert done.sweeps > 1
    exact = noise @ kernel_projector(kind(model, [(x, y)]).dense())
    torch.testing.assert_close(done.directions, exact, rtol=0.0, atol=1e-6)


def test_published_algorithm_takes_linearly_dependent_rows() -> None:
    model, x, y = network()
    twice = torch.cat([x[:8], x[:8]])
    sweeps = published.PublishedSweeps(nb.OutputJacobian, model, twice, y[:16])
    noise = torch.randn(2, sweeps.rows.n_columns).double()
    exact = noise @ kernel_projector(nb.OutputJacobian(model, [(x[:8], y[:8])]).dense())
    torch.testing.assert_close(sweeps.sweep(noise), exact, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", [nb.OutputJacobian, nb.LossJacobian])
def test_block_step_matches_the_dense_block(kind: type[nb.OutputJacobian]) -> None:
    model, x, y = network()
    rows = kind(model, [(x[:16], y[:16])], storage="matrix_free")
    noise, dense = torch.randn(3, rows.n_columns).double(), kind(model, [(x[:16], y[:16])]).dense()
    taken = published.block_step(rows, x[:16], y[:16], torch.linalg.pinv(dense @ dense.mT, hermitian=True), noise)
    torch.testing.assert_close(noise - taken, noise @ kernel_projector(dense), rtol=0.0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on CUDA")
@pytest.mark.parametrize("kind", [nb.OutputJacobian, nb.LossJacobian])
def test_recorded_sweeps_match_plain_sweeps(kind: type[nb.OutputJacobian]) -> None:
    model, x, y = network()
    sweeps = published.PublishedSweeps(kind, model.cuda(), x.cuda(), y.cuda())
    noise = torch.randn(3, sweeps.rows.n_columns).double().cuda()
    plain = sweeps.sweep(noise)
    sweeps.record(noise)
    assert sweeps.unrecorded is None
    torch.testing.assert_close(sweeps.sweep(noise), plain)


def test_budget_that_ends_early_is_reported() -> None:
    model, x, y = network()
    sweeps = published.PublishedSweeps(nb.OutputJacobian, model, x, y, examples=2)
    noise = torch.randn(2, sweeps.rows.n_columns).double()
    done = published.run_until(sweeps, noise, tolerance=1e-12, budget=0.0)
    assert (done.reached, done.sweeps) == (False, 1)
    rows = sweeps.rows
    assert done.residual == pytest.approx(float((rows.norms(done.directions) / rows.norms(noise)).max()))
    assert done.residual > 1e-12
    assert done.seconds >= done.factor_seconds > 0


# --- around them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_exponent_fits_timings(slope: float) -> None:
    sizes = [100, 200, 400, 800]
    noise = [1.02, 0.98, 0.98, 1.02]
    seconds = [3e-4 * size**slope * factor for size, factor in zip(sizes, noise, strict=True)]
    assert measure.exponent(sizes, seconds) == pytest.approx(slope, abs=0.02)


def test_exponent_of_one_size_is_refused() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        measure.exponent([10, 10], [1.0, 2.0])


def test_swin_answers_with_logits() -> None:
    pytest.importorskip("transformers")
    model = problems.swin(16, 8, (1, 1), (1, 2), 2)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 1000)


def test_options_are_read_as_what_they_were() -> None:
    case = ModuleType("case")
    case.SMALL = {"n": 1, "rate": 0.5, "pool": "max", "rows": ("output",), "sizes": (1, 2), "tiny": True}
    texts = {"n": "7", "rate": "1e-3", "pool": "avg", "rows": "loss,output", "sizes": "3", "tiny": "false", "not": "1"}
    assert runner.options_of(case, "small", CPU, texts) == {
        "n": 7, "rate": 1e-3, "pool": "avg", "rows": ("loss", "output"), "sizes": (3,), "tiny": False,
    }  # fmt: skip
    with pytest.raises(runner.UsageError, match="write it like n=1"):
        runner.options_of(case, "small", CPU, {"n": "many"})


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["no_such_case"], "there are blocks, "),
        (["choice", "--set", "colour=red"], "with one of direct, "),
        (["choice", "--set", "n"], "write NAME=VALUE"),
        (["choice", "--device", "cuda"], "use --device cpu"),
    ],
)
def test_arguments_that_cannot_run_are_refused_with_advice(
    arguments: list[str], advice: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner.main(arguments) == 2
    assert advice in " ".join(capsys.readouterr().err.split())


def test_command_lists_the_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in runner.case_names())


@pytest.mark.slow
def test_module_runs_where_only_the_library_is_installed(tmp_path: Path) -> None:
    absent, target = ["rich", "sklearn", "matplotlib", "scipy"], tmp_path / "result.json"
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({absent!r})); "
        f"sys.argv[1:] = ['sweep_growth', '--set', 'n=16,32', '--json', {str(target)!r}]; "
        f"runpy.run_module('benchmarks', run_name='__main__')"
    )
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other take longer than the work
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=FOLDER.parent, env=one_thread
    )
    assert done.returncode == 0, done.stderr
    assert "exponents" in done.stdout
    assert json.loads(target.read_text())["cases"][0]["options"]["n"] == [16, 32]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_use_public_names_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nullbayes":
            assert (node.module or "").startswith("nullbayes.experiments")  # which uses public names only, too
        if isinstance(node, ast.Import):
            assert all(alias.name == "nullbayes" or "nullbayes" not in alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nb":
            assert node.attr in ("__version__", "__file__") or not node.attr.startswith("_")
