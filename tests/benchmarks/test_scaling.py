"""The model of a fit on many processes: it reproduces measured runs, and its formulas have the right limits."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases.processes import TOGETHER, counting
from torch import nn

import nullbayes as nb
from benchmarks import run as runner
from benchmarks import scaling, simulator
from nullbayes.errors import ConvergenceWarning
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.limits import VECTORS_PER_SAMPLE
from nullbayes.posteriors import parallel
from nullbayes.projectors import krylov

ROOT = Path(__file__).parents[2]
RUNS = scaling.measured(json.loads((ROOT / "results" / "processes.json").read_text(encoding="utf-8")))
MACHINE = scaling.fitted(RUNS)
HELD = simulator.Problem(rows=4096, parameters=1000, samples=32, block_rows=64, sweeps=40, held_bytes=4096 * 4000)
FORMED = replace(HELD, held_bytes=0)
each_way = pytest.mark.parametrize("way", ["data", "samples"])
each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['parallel']}-{run['processes']}")


def simulated(run: dict[str, Any]) -> simulator.Estimate:
    return simulator.simulate(scaling.problem_of(run), MACHINE, run["parallel"], run["processes"])


def within(factor: float, found: float, expected: float) -> bool:
    return expected / factor <= found <= expected * factor


# --- measured runs ----------------------------------------------------------------------------------------------------


def test_runs_of_one_two_and_four_processes_are_stored() -> None:
    assert {(run["parallel"], run["processes"]) for run in RUNS} == {
        (way, n) for way in ("data", "samples") for n in (1, 2, 4)
    }


@each_run
def test_model_is_near_the_measured_time_and_memory(run: dict[str, Any]) -> None:
    found = simulated(run)
    assert within(1.3, found.cpu_seconds, run["cpu_seconds"])
    assert within(2.0, found.seconds, run["seconds"])  # other programs ran, too
    assert within(1.2, found.memory, 1e6 * run["peak_megabytes"])


@each_run
def test_model_counts_the_bytes_that_were_passed_on(run: dict[str, Any]) -> None:
    found = simulated(run)
    assert found.passed_bytes == pytest.approx(1e6 * run["megabytes"], rel=0.01)
    assert simulator.sent_bytes(1.0, run["processes"]) == pytest.approx(run["moved"], rel=0.01)
    if run["parallel"] == "data" and run["processes"] > 1:
        assert run["large_sums"] == simulator.applications(run["sweeps"])
        assert run["exchanges"] == found.exchanges


@pytest.mark.slow
def test_model_counts_the_bytes_of_a_fit_of_another_size() -> None:
    overrides = {"n": "60", "samples": "6", "processes": "2"}
    cpu = torch.device("cpu")
    record = runner.run_case("processes", size="small", device=cpu, data=None, seed=0, overrides=overrides)
    (run,) = record["rows"]
    found = simulator.simulate(scaling.problem_of(run), MACHINE, "data", 2)
    assert run["megabytes"] > 0
    assert found.passed_bytes == pytest.approx(1e6 * run["megabytes"], rel=0.1)


def test_a_process_by_itself_counts_no_exchange_and_the_group_is_left_as_it_was() -> None:
    before = dict(vars(nb.distributed.Group))
    with counting() as counted:
        nb.distributed.Group().sum(torch.ones(3))
        assert vars(nb.distributed.Group) != before
    assert not counted
    assert vars(nb.distributed.Group) == before


# --- limits of the formulas -------------------------------------------------------------------------------------------


@each_way
def test_one_process_exchanges_nothing(way: str) -> None:
    found = simulator.simulate(HELD, MACHINE, way, 1)
    assert (found.exchanges, found.passed_bytes, found.sent_bytes, found.exchanging) == (0, 0.0, 0.0, 0.0)


@each_way
@pytest.mark.parametrize("what", ["samples", "parameters"])
def test_bytes_are_linear_in_samples_and_parameters(way: str, what: str) -> None:
    once, thrice = (
        simulator.simulate(replace(HELD, **{what: factor * getattr(HELD, what)}), MACHINE, way, 4) for factor in (1, 3)
    )
    assert thrice.passed_bytes == pytest.approx(3 * once.passed_bytes)
    assert thrice.sent_bytes == pytest.approx(3 * once.sent_bytes)


def test_a_sweep_sends_two_vectors_per_sample_at_most_and_one_between_two_processes() -> None:
    vectors = HELD.samples * HELD.parameters * 4
    for processes, share in ((2, 1.0), (4, 1.5), (2**20, 2.0)):
        assert simulator.sent_bytes(vectors, processes) == pytest.approx(share * vectors, rel=1e-5)
    found = simulator.simulate(replace(HELD, sweeps=19), MACHINE, "data", 2)
    assert found.sent_bytes == pytest.approx(20 * vectors)  # one sweep to start, and none to renew


def test_shared_data_divide_the_work_and_the_rows_but_not_the_vectors() -> None:
    one, four = (simulator.simulate(HELD, MACHINE, "data", n) for n in (1, 4))
    for what in ("forming", "factoring", "multiplying"):
        assert getattr(four, what) == pytest.approx(getattr(one, what) / 4), what
    lasting = MACHINE.temporary + 10 * HELD.samples * HELD.parameters * 4
    assert four.memory - lasting == pytest.approx((one.memory - lasting) / 4)


def test_shared_samples_divide_the_products_alone_down_to_sixteen_samples() -> None:
    one, two, four = (simulator.simulate(HELD, MACHINE, "samples", n) for n in (1, 2, 4))
    assert (two.forming, two.factoring, two.memory) == (one.forming, one.factoring, one.memory)
    assert two.multiplying == pytest.approx(one.multiplying / 2)
    assert four.multiplying == two.multiplying


def test_samples_in_parts_read_the_rows_more_often() -> None:
    at_once, in_parts = (simulator.simulate(HELD, MACHINE, way, 1).multiplying for way in ("data", "samples"))
    more = (1 + 40 + 40 // 20) * HELD.rows * HELD.parameters * MACHINE.read
    assert in_parts - at_once == pytest.approx(more)


def test_rows_that_fit_are_formed_once_and_others_in_every_sweep() -> None:
    n_bytes = FORMED.parameters * 4
    vectors, factors = 10 * 32 * n_bytes, 4096 * 64 * 8
    once = simulator.simulate(HELD, MACHINE, "data", 1).forming
    sweeps, checked = 1 + 40 + 40 // 20, 3 + simulator.checks(40)
    for blocks, formings in ((2, 1 + sweeps + checked), (1, (4 + 1) / 2 + 2 * sweeps + checked)):
        room = (vectors + factors + blocks * 64 * n_bytes + MACHINE.temporary) / 0.85
        found = simulator.simulate(FORMED, replace(MACHINE, memory=room + 1), "data", 1)
        assert found.forming / once == pytest.approx(formings)


def test_what_does_not_fit_does_not_fit_on_any_number_of_processes() -> None:
    few = replace(MACHINE, memory=10 * HELD.samples * HELD.parameters * 4)
    assert not any(simulator.fastest(FORMED, few, "data", n).fits for n in (1, 64, 4096))
    assert simulator.fastest(FORMED, few, "data", 64).seconds == float("inf")


def test_more_processes_than_cores_take_turns() -> None:
    one, four = (simulator.simulate(HELD, replace(MACHINE, cores=2), "data", n) for n in (1, 4))
    assert one.seconds == one.cpu_seconds
    assert four.seconds == 2 * four.cpu_seconds


def test_a_slow_connection_between_machines_counts_only_where_there_are_several() -> None:
    slow = replace(MACHINE, bandwidth=1e9, between=1e6, node=4)
    four, eight = (simulator.simulate(HELD, slow, "data", n) for n in (4, 8))
    assert four.exchanging == simulator.simulate(HELD, replace(slow, between=1e9), "data", 4).exchanging
    assert eight.exchanging - eight.sent_bytes / 1e6 == pytest.approx(
        eight.exchanges * 7 * (slow.handshake + slow.latency)
    )


def test_processes_stop_paying_where_exchanges_take_over() -> None:
    free = replace(MACHINE, cores=None, fixed=0.0, handshake=0.0, latency=0.0, bandwidth=float("inf"))
    steady = replace(HELD, rows=2**14)
    assert simulator.limit(steady, free) == steady.rows
    assert simulator.limit(steady, replace(free, handshake=1e-2)) < 64


def test_best_blocks_are_no_worse_than_any_other() -> None:
    problem = replace(HELD, sweeps=None)  # fewer blocks need fewer sweeps, and more time for factors
    machine = replace(MACHINE, factor=10 * MACHINE.factor)
    best = simulator.fastest(problem, machine, "data", 2)
    assert 1 < best.block_rows < 2048
    for k in range(12):
        assert best.seconds <= simulator.simulate(replace(problem, block_rows=2**k), machine, "data", 2).seconds


# --- what the library does --------------------------------------------------------------------------------------------


def test_constants_are_those_of_the_library() -> None:
    assert (simulator.VECTORS, simulator.RENEW_EVERY, TOGETHER) == (
        VECTORS_PER_SAMPLE, krylov._RENEW_EVERY, parallel.TOGETHER,
    )  # fmt: skip
    for blocks in (1, 2, 10, 64, 4096):
        for tolerance in (1e-2, 2e-2):
            assert abs(simulator.expected_sweeps(blocks, tolerance) - krylov.expected_sweeps(blocks, tolerance)) <= 0.5


def test_residual_is_measured_as_often_as_the_model_says() -> None:
    seen = list[int]()
    generator = torch.Generator().manual_seed(0)
    rows = nb.DenseRows(torch.randn(24, 40, generator=generator, device="cpu"))
    projector = nb.projectors.Alternating(block_rows=2, rtol=1e-6, max_sweeps=60)
    state, noise = projector.prepare(rows), torch.randn(1, 40, generator=generator, device="cpu")
    with pytest.warns(ConvergenceWarning):
        projector.apply(state, noise, callback=lambda k, _: seen.append(k))
    assert seen[-1] == 60
    assert [simulator.checks(k) for k in seen[:-1]] == list(range(1, len(seen)))


@pytest.mark.slow
@pytest.mark.parametrize(("block_rows", "pieces"), [(4, 1), (20, 10)])
def test_rows_are_formed_as_often_as_the_model_says(
    block_rows: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed, form = list[int](), JacobianRows._pieces
    monkeypatch.setattr(JacobianRows, "_pieces", lambda rows, a, b: (formed.append(b - a), form(rows, a, b))[1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 1, 6, 6, generator=generator, device="cpu")
    data = [(x, torch.arange(40, device="cpu") % 10)]
    with torch.device("cpu"):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 10))
    row = nb.LossJacobian(model, data).costs().held_bytes // 40
    posterior = nb.LossProjectedPosterior(model, prior_precision=1e6)
    projector = nb.projectors.Krylov(nb.projectors.Alternating(block_rows=block_rows), rtol=0.1)
    formed.clear()
    posterior.fit(data, 3, projector=projector, memory_limit=64 * row, progress=False)  # an eighth to work with
    sweeps = posterior.report.sweeps
    assert 1 < sweeps < 20
    expected = simulator.times_formed(pieces, simulator.applications(sweeps), simulator.checks(sweeps))
    assert sum(formed) / 40 == pytest.approx(expected)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_page_has_the_tables_of_the_stored_run() -> None:
    page = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")
    assert page == scaling.written(page, scaling.document(RUNS)), "run make docs"


def test_tables_are_printed_or_written_between_the_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, page = ROOT / "results" / "processes.json", tmp_path / "page.md"
    assert scaling.main([str(stored)]) == 0
    printed = capsys.readouterr().out
    page.write_text(f"before\n{scaling.BEGIN}\nold\n{scaling.END}\nafter\n", encoding="utf-8")
    assert scaling.main([str(stored), "--write", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == f"before\n{scaling.BEGIN}\n\n{printed}\n{scaling.END}\nafter\n"
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match="no place for the tables"):
        scaling.main([str(stored), "--write", str(page)])


def test_runs_that_give_no_constants_are_refused() -> None:
    with pytest.raises(SystemExit, match='parallel="samples" and 1 processes'):
        scaling.fitted([run for run in RUNS if run["parallel"] == "data"])
    disturbed = copy.deepcopy(RUNS)
    next(run for run in disturbed if run["parallel"] == "samples")["projection_seconds"] = 0.1
    with pytest.raises(SystemExit, match="read come out negative"):
        scaling.fitted(disturbed)
