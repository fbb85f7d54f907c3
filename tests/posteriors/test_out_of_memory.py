"""A fit that runs out of memory continues with less and notes it; one that cannot says what to change.

Nothing is pretended: processes are given too little address space, and networks ask for more memory than there is.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.limits import is_out_of_memory
from nullbayes.posteriors import checkpoint
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.projectors import Alternating, ExactDual, Krylov, Lanczos
from support.drawing import randn
from support.memory_shortage import (
    DATA,
    Hungry,
    Plain,
    fit_with_projector,
    forked,
    in_a_process,
    on_linux,
    problem,
    starve,
)

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

# --- too little address space -----------------------------------------------------------------------------------------

# projector, MiB that the process may still take, and what comes of it
STARVED: dict[str, tuple[Any, int, str]] = {
    "a smaller plan": ("auto", 24, "memory ran out where 34.6 MiB were planned; planned again with "),
    "no plan is small enough": ("auto", 4, "the least memory_limit that would do is 9 MiB"),
    "smaller blocks": (Krylov(rtol=0.1), 30, "went on with blocks of 1,250 rows, rows "),
    "no matrix of all rows": (ExactDual(rtol=0.1), 30, "nb.projectors.Krylov(nb.projectors.Alternating(block_rows="),
    "no basis of that rank": (Lanczos(rank=2500, rtol=0.1), 30, "lower rank, or use projector=\"auto\""),
}  # fmt: skip


def starved(folder: Path) -> None:
    """Fit in processes that have too little memory, and leave what came of it in files."""
    model, data = problem()
    few = [(data[0][0][:4], data[0][1][:4])]
    for projector in ("auto", Krylov(), Krylov(Alternating(block_rows=10)), ExactDual(), Lanczos()):  # libraries load
        fit_with_projector(model, few, projector, n_samples=2)

    def work(name: str) -> None:
        projector, mib, _ = STARVED[name]
        starve(mib)
        try:
            posterior = fit_with_projector(model, data, projector, memory_limit="4GB")
        except nb.errors.SettingsError as error:
            found = {"error": str(error), "known": is_out_of_memory(error.__cause__)}
        else:
            posterior.save(folder / f"{name}.posterior")
            found = posterior.report.to_dict()
        (folder / f"{name}.json").write_text(json.dumps(found))

    def killed() -> None:
        checkpoint._EVERY, save = 0.0, Checkpoint.save

        def deadly(self: Checkpoint, state: Any, **options: Any) -> None:
            save(self, state, **options)
            if state["counts"][0] == 4:
                os._exit(9)

        Checkpoint.save = deadly
        starve(STARVED["a smaller plan"][1])
        fit_with_projector(model, data, "auto", memory_limit="4GB", checkpoint=folder / "checkpoint")

    def from_direct_to_iterative(mib: int) -> None:
        checkpoint._EVERY, save, seen = 0.0, Checkpoint.save, set[bool]()

        def spy(self: Checkpoint, state: Any, **options: Any) -> None:
            save(self, state, **options)
            seen.add((folder / "direct").exists())

        Checkpoint.save = spy
        starve(mib)
        less = [(data[0][0][:49], data[0][1][:49])]
        report = fit_with_projector(
            model, less, "auto", n_samples=2, memory_limit="4GB", checkpoint=folder / "direct"
        ).report
        (folder / "direct.json").write_text(json.dumps({**report.to_dict(), "stored": list(seen)}))

    for mib in range(14, 5, -1):  # how much is just too little depends on what the libraries have in reserve
        (folder / "direct").unlink(missing_ok=True)
        if forked(functools.partial(from_direct_to_iterative, mib)) == 0:
            found = json.loads((folder / "direct.json").read_text())
            if found["notes"]:
                break
    for name in STARVED:
        assert forked(functools.partial(work, name)) == 0, name
    assert os.waitstatus_to_exitcode(forked(killed)) == 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("starved")
    in_a_process(__file__, "starve", str(place))
    return place


@on_linux
@pytest.mark.cpu
@pytest.mark.parametrize("name", STARVED)
def test_too_little_memory_gives_a_smaller_fit_or_an_error_with_advice(name: str, folder: Path) -> None:
    found, expected = json.loads((folder / f"{name}.json").read_text()), STARVED[name][2]
    if "error" in found:
        assert expected in found["error"]
        assert found["known"]
        return
    assert expected in found["notes"][0]
    assert found["converged"]
    assert max(found["residual"]) <= 0.1
    report = nb.load(folder / f"{name}.posterior", problem()[0]).report  # as it was saved
    assert list(report.notes) == found["notes"]
    assert f"\nnote              {found['notes'][0]}" in str(report)


@on_linux
@pytest.mark.cpu
def test_a_killed_fit_that_had_run_out_of_memory_resumes_bit_for_bit(folder: Path) -> None:
    model, data = problem()
    starved = nb.load(folder / "a smaller plan.posterior", model)
    resumed = fit_with_projector(model, data, "auto", memory_limit="4GB", checkpoint=folder / "checkpoint")
    assert resumed.report.notes == starved.report.notes
    assert torch.equal(resumed.directions, starved.directions)
    assert not (folder / "checkpoint").exists()


@on_linux
@pytest.mark.cpu
def test_a_fit_that_becomes_iterative_starts_and_removes_a_checkpoint(folder: Path) -> None:
    found = json.loads((folder / "direct.json").read_text())
    assert (found["projector"], len(found["notes"]), found["stored"]) == ("Krylov", 1, [True])  # 490 rows: ExactDual
    assert not (folder / "direct").exists()


def starved_gpu() -> None:
    """Fit with less memory than rows and factors take that stay; fewer rows can be formed at a time without a note."""
    from test_memory import problem as larger

    model, data = larger("lenet", 2000)
    model, data = model.cuda(), [(x.cuda(), y.cuda()) for x, y in data]
    fit_with_projector(model, [(data[0][0][:4], data[0][1][:4])], "auto", n_samples=2)
    plan = nb.plan(model, data, 30, "20GB", tolerance=0.1)
    factors = 4 * plan.n_rows * plan.projector.alternating.block_rows  # at least: they may have eight bytes
    stays = nb.OutputJacobian(model, data).costs(plan.storage).device_bytes + factors
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.8 * stays) / whole)
    print(json.dumps(fit_with_projector(model, data, "auto", n_samples=30, memory_limit="20GB").report.to_dict()))
    try:
        fit_with_projector(
            model, data, ExactDual(), memory_limit="20GB"
        )  # 20,000 rows: 3 GiB for their Gram matrix alone
    except nb.errors.SettingsError as error:
        print(json.dumps({"error": str(error), "cause": type(error.__cause__).__name__}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_too_little_gpu_memory_gives_a_smaller_fit_or_an_error_with_advice() -> None:
    found, refused = (json.loads(line) for line in in_a_process(__file__, "starve a gpu").splitlines()[-2:])
    assert "memory ran out where" in found["notes"][0]
    assert found["converged"]
    assert STARVED["no matrix of all rows"][2] in refused["error"]
    assert refused["cause"] == "OutOfMemoryError"


# --- an allocation that fails once ------------------------------------------------------------------------------------


def linearize(model: nn.Module) -> Any:
    vectors = randn(1, 54, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = Network(model)
    return linearized(network, DATA[0][0], vectors[:, : network.n_parameters])


def form_plainly(model: nn.Module) -> Any:
    network = Network(model)
    rows = RowBuilder(network, lambda flat, x, y: network(flat, x), *DATA[0])
    return rows.plain(*DATA[0], ((0, network.n_parameters),))


@pytest.mark.parametrize("work", [linearize, form_plainly])
@pytest.mark.parametrize("kind", [Hungry, Plain])
def test_out_of_memory_errors_are_not_taken_for_unsupported_routes(
    kind: type[Hungry], work: Callable[[nn.Module], Any]
) -> None:
    model = kind().failing_at(0)
    work(model)
    calls = Hungry.calls
    assert calls
    for call in range(1, calls + 1):
        with pytest.raises((RuntimeError, torch.OutOfMemoryError)) as caught:
            work(model.failing_at(call))
        assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("kind", [Hungry, Plain])
def test_rows_are_formed_in_halves_where_memory_runs_out(kind: type[Hungry]) -> None:
    model = kind().failing_at(0)
    rows = nb.OutputJacobian(model, DATA)
    opening, whole, route = Hungry.calls, rows.dense(), rows.route
    last = Hungry.calls
    assert last > opening
    for call in (1, opening):
        with pytest.raises((RuntimeError, torch.OutOfMemoryError)) as caught:
            nb.OutputJacobian(model.failing_at(call), DATA)
        assert is_out_of_memory(caught.value)
    for call in range(opening + 1, last + 1):
        halved = nb.OutputJacobian(model.failing_at(call), DATA)
        torch.testing.assert_close(halved.dense(), whole)
        assert halved.route == route
    one = nb.OutputJacobian(model.failing_at(0), [(DATA[0][0][:1], DATA[0][1][:1])])
    model.failing_at(1)
    with pytest.raises((RuntimeError, torch.OutOfMemoryError)) as caught:
        one.dense()
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        pytest.param(nb.ProjectedPosterior, nb.OutputJacobian, id="projected"),
        pytest.param(nb.LossProjectedPosterior, nb.LossJacobian, marks=pytest.mark.slow, id="loss-projected"),
    ],
)
@pytest.mark.parametrize(
    "projector",
    [
        pytest.param(Krylov(Alternating(block_rows=3), rtol=0.1), marks=pytest.mark.slow, id="Krylov"),
        pytest.param(ExactDual(), id="ExactDual"),
    ],
)
def test_allocations_that_fail_do_not_end_a_fit(kind: type, rows: type, projector: Any) -> None:
    model = Plain().failing_at(0)
    rows(model, DATA).costs()  # what has to be known before there is a plan
    opening, whole = Hungry.calls, fit_with_projector(model.failing_at(0), DATA, projector, kind=kind)
    assert whole.report.notes == ()
    for call in range(opening + 1, Hungry.calls + 1):
        posterior = fit_with_projector(model.failing_at(call), DATA, projector, kind=kind)
        assert posterior.report.converged
        assert posterior.n_samples == 8
    until_one_example_is_too_many = 3  # of six
    model.failing_at(opening + 1, until_one_example_is_too_many)
    posterior = fit_with_projector(model, DATA, projector, kind=kind)
    assert posterior.report.converged
    assert "memory ran out" in posterior.report.notes[0]


@pytest.mark.parametrize("pred_type", ["linearized", "sampled"])
def test_predictions_continue_with_half_of_the_inputs(pred_type: str) -> None:
    model, x = Plain(), DATA[0][0]
    posterior = fit_with_projector(model, DATA, "auto")
    model.failing_at(0)
    whole = posterior.predict(x, pred_type=pred_type).samples
    calls = Hungry.calls
    assert calls
    for call in range(1, calls + 1):
        model.failing_at(call)
        torch.testing.assert_close(posterior.predict(x, pred_type=pred_type).samples, whole)
    model.failing_at(1)
    with pytest.raises((RuntimeError, torch.OutOfMemoryError)) as caught:
        posterior.predict(x[:1], pred_type=pred_type)
    assert is_out_of_memory(caught.value)


# --- which errors they are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda: torch.empty(2**58, dtype=torch.uint8), True),
        (lambda: torch.empty(2**58, dtype=torch.uint8, device="cpu"), True),
        (lambda: bytearray(2**58), True),
        (lambda: torch.ones(2) @ torch.ones(3), False),
        (lambda: torch.linalg.cholesky(-torch.eye(2)), False),
        (lambda: torch.zeros(2)[5], False),
    ],
)
def test_out_of_memory_errors_are_recognized(action: Callable[[], Any], expected: bool) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - that is the question
        action()
    assert is_out_of_memory(caught.value) is expected


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "starve":
        starved(Path(sys.argv[2]))
    else:
        starved_gpu()
