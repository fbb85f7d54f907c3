"""`choose` takes the soonest of the ways that fit in memory, never more of it than it may, and says why."""

import itertools
import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nullbayes.errors import SettingsError
from nullbayes.limits import LIMITS, PieceCosts, RowCosts, Storage, rates_of
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Plan, Sketched, auto, choose
from nullbayes.projectors.sketched import combinations

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Shape:
    """What rows cost, without rows: a choice must not need more."""

    n_rows: int
    n_columns: int
    rows_per_example: int = 1
    held: bool = False
    packed: int = 1  # how many times fewer bytes than entries: factors of outer products
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    example_bytes: int = 0  # temporary bytes per example to form its rows
    example_flops: float = 0.0  # of the network, while they are formed

    def costs(self, storage: Storage = "device") -> RowCosts:
        stored = self.n_rows * self.n_columns * self.dtype.itemsize // self.packed
        n_bytes = 0 if self.held else stored
        return RowCosts(
            n_rows=self.n_rows,
            n_columns=self.n_columns,
            rows_per_example=self.rows_per_example,
            dtype=self.dtype,
            device=torch.device(self.device),
            working_bytes=LIMITS[self.device].working_bytes,
            storage=storage,
            pieces=(PieceCosts(stored, 2.0 * self.n_columns, 2.0 * self.n_columns),),
            full_bytes=n_bytes,
            held_bytes={"device": n_bytes, "host": n_bytes, "half": n_bytes // 2}.get(storage, 0),
            normal_flops=float(self.n_rows) * self.n_columns**2,
            numbers_per_row=self.n_columns,
            example_bytes=self.example_bytes,
            example_flops=self.example_flops,
        )


@pytest.fixture
def graphics_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice asks the card for its capability only, and there may be none here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def block_rows(plan: Plan) -> int:
    blocks = plan.projector.alternating if isinstance(plan.projector, Krylov) else plan.projector
    assert isinstance(blocks, Alternating)
    assert blocks.block_rows is not None
    return blocks.block_rows


@pytest.mark.parametrize(
    ("n_rows", "n_columns", "kind"),
    [
        (1, 2, ExactDual),
        (500, 40_000, ExactDual),
        (500, 501, ExactDual),
        (1_001, 2_000, Krylov),
        (20_000, 40_000, Krylov),
        (60_000, 500, ExactPrimal),
        (100, 100, ExactPrimal),
        (1, 1, ExactPrimal),
        (60_000, 1_001, Krylov),
    ],
)
def test_few_rows_or_few_columns_are_solved_directly(n_rows: int, n_columns: int, kind: type) -> None:
    plan = choose(Shape(n_rows, n_columns), n_samples=30, memory_limit=1000 * GIB, rtol=3e-3)
    assert type(plan.projector) is kind
    assert plan.projector.rtol == 3e-3
    if kind is not Krylov:
        assert plan.projector.truncate  # there may be no exact kernel
    assert plan.storage in ("device", "half")
    assert f"{n_rows:,}" in plan.reason or f"{n_columns:,}" in plan.reason
    assert (plan.n_rows, plan.n_parameters, plan.n_samples) == (n_rows, n_columns, 30)
    assert plan.operations > 0
    assert plan.seconds > 0


@pytest.mark.parametrize(("n_rows", "n_columns"), [(600_000, 5_000), (60_000, 2_000), (20_000, 4_000)])
def test_many_rows_over_few_columns_use_the_normal_matrix(n_rows: int, n_columns: int) -> None:
    plan = choose(Shape(n_rows, n_columns), n_samples=30, memory_limit=1000 * GIB)
    assert block_rows(plan) == n_rows  # one block of more rows than columns: Alternating takes the smaller matrix
    assert "normal matrix" in plan.reason


def test_normal_matrix_that_does_not_fit_is_not_planned() -> None:
    rows = Shape(600_000, 10_000, held=True)
    assert "normal matrix" in choose(rows, n_samples=30, memory_limit=64 * GIB).reason
    plan = choose(rows, n_samples=30, memory_limit=GIB // 2)  # less than 10,000²
    assert "normal matrix" not in plan.reason
    assert block_rows(plan) < 10_000


def test_many_outputs_per_example_are_sketched_on_a_cpu_where_that_is_sooner(graphics_card: None) -> None:
    def projector(outputs: int, n_rows: int = 20_000, device: str = "cpu", rtol: float = 1e-2) -> object:
        rows = Shape(n_rows, 44_426, outputs, packed=12, device=device)
        return choose(rows, n_samples=30, memory_limit=16 * GIB, rtol=rtol).projector

    assert isinstance(projector(10), Sketched)
    assert isinstance(projector(10, rtol=1e-3), Krylov)  # exact variances would be lost
    assert isinstance(projector(1), Krylov)  # no combinations of a single row
    assert isinstance(projector(10, 2_000), Krylov)  # all of them are factored in a moment
    assert isinstance(projector(10, device="cuda"), Krylov)
    assert isinstance(projector(10, 60_000), Sketched)  # more than the parameters
    assert not isinstance(projector(10, 600_000), Sketched)  # combinations would be more than the parameters


@pytest.mark.parametrize("outputs", [1, 10])
def test_blocks_of_more_rows_than_parameters_are_swept_one_after_the_other(outputs: int, graphics_card: None) -> None:
    """Conjugate gradients over blocks would leave little variance, and not what tells strangers."""
    for n_rows, limit, kind in [(20_000, 3, Krylov), (60_000, 12, Alternating)]:
        rows = Shape(n_rows, 44_426, outputs, device="cuda")
        plan = choose(rows, n_samples=30, memory_limit=limit * GIB)  # less than a factor of all rows needs
        assert block_rows(plan) < n_rows
        assert isinstance(plan.projector, kind)
        assert ("one after the other" in plan.reason) == (kind is Alternating)


def test_blocks_of_several_processes_are_swept_by_conjugate_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sweeps of several processes are averaged, which takes many more."""
    rows, one = Shape(60_000, 44_426), Shape.costs
    assert isinstance(choose(rows, n_samples=30, memory_limit=20 * GIB).projector, Alternating)
    monkeypatch.setattr(Shape, "costs", lambda self, storage="device": replace(one(self, storage), processes=2))
    assert isinstance(choose(rows, n_samples=30, memory_limit=20 * GIB).projector, Krylov)


@pytest.mark.parametrize(
    ("n_rows", "n_blocks", "taken"),
    [(45_000, 2, Alternating), (45_000, 16, Alternating), (23_000, 2, Alternating), (22_000, 2, Krylov),
     (45_000, 1, Krylov), (45_000, 17, Krylov)],
)  # fmt: skip
def test_conjugate_gradients_over_few_blocks_are_taken_only_where_clearly_sooner(
    n_rows: int, n_blocks: int, taken: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From half as many rows as parameters on, they leave less of the variance."""
    rows, blocks = Shape(n_rows, 44_426), Alternating(block_rows=-(-n_rows // n_blocks))
    one = replace(choose(rows, n_samples=30, memory_limit=64 * GIB), storage="device")
    plans = [replace(one, projector=Krylov(blocks), seconds=1.0), replace(one, projector=blocks, seconds=1.9)]
    monkeypatch.setattr(auto, "_plans", lambda *_: plans)
    assert isinstance(choose(rows, n_samples=30, memory_limit=64 * GIB).projector, taken)
    plans[1] = replace(plans[1], seconds=2.1)
    assert isinstance(choose(rows, n_samples=30, memory_limit=64 * GIB).projector, Krylov)


@pytest.mark.parametrize(("rtol", "gib"), [(2e-3, 4), (1e-2, 0.3)])
def test_many_blocks_and_tight_tolerances_are_left_to_conjugate_gradients(rtol: float, gib: float) -> None:
    """Sweeps without acceleration are then many times as many."""
    plan = choose(Shape(60_000, 20_000), n_samples=10, memory_limit=int(gib * GIB), rtol=rtol)
    assert isinstance(plan.projector, Krylov)


def test_combinations_of_rows_in_memory_take_memory() -> None:
    rows = Shape(20_000, 44_426, 10, held=True)
    plan = choose(rows, n_samples=10, memory_limit=64 * GIB)
    assert isinstance(plan.projector, Sketched)
    assert plan.peak_bytes > plan.projector.share * rows.n_rows * rows.n_columns * 4


def test_rows_that_do_not_fit_are_sketched_on_a_graphics_card_too(graphics_card: None) -> None:
    def projector(n_rows: int, outputs: int = 10) -> object:
        rows = Shape(n_rows, 269_722, outputs, device="cuda", example_bytes=2**24)
        return choose(rows, n_samples=30, memory_limit=119 * GIB, rtol=3e-2).projector

    assert isinstance(projector(100_000), Krylov)  # which fit as halves
    assert isinstance(projector(500_000), Sketched)
    assert not isinstance(projector(500_000, 2), Sketched)


@pytest.mark.parametrize(("outputs", "n_rows", "combined"), [(3, 20_001, 1), (10, 6_000, 2), (10, 60_000, 1)])
def test_fewer_rows_of_an_example_are_combined_of_many_examples(outputs: int, n_rows: int, combined: int) -> None:
    rows = Shape(n_rows, 100_000, outputs, packed=12)
    projector = choose(rows, n_samples=30, memory_limit=64 * GIB, rtol=5e-2).projector
    assert isinstance(projector, Sketched)
    assert combinations(projector.share, outputs) == combined


@pytest.mark.parametrize(("sooner", "storage"), [(1.03, "device"), (1.08, "half")])
def test_entries_on_the_device_are_preferred_where_nothing_is_clearly_sooner(
    sooner: float, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Shape(20_000, 44_426)
    plan = choose(rows, n_samples=30, memory_limit=64 * GIB)
    plans = [replace(plan, storage="half", seconds=1.0), replace(plan, storage="device", seconds=sooner)]
    monkeypatch.setattr(auto, "_plans", lambda *_: plans)
    assert choose(rows, n_samples=30, memory_limit=64 * GIB).storage == storage


def test_divided_columns_are_not_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Shape(20_000, 44_426, 10, packed=12)
    one = rows.costs
    monkeypatch.setattr(Shape, "costs", lambda _, storage="device": replace(one(storage), column_parts=2))
    assert isinstance(choose(rows, n_samples=30, memory_limit=16 * GIB).projector, Krylov)


@pytest.mark.parametrize("shape", [(20_000, 40_000), (60_000, 20_000)])
def test_less_memory_means_smaller_blocks_then_rows_formed_again_then_a_refusal(shape: tuple[int, int]) -> None:
    rows = Shape(*shape)
    limits = (128, 16, 8, 4, 2, 1, 0.5, 0.25, 0.125)
    plans = [choose(rows, n_samples=10, memory_limit=int(limit * GIB)) for limit in limits]
    blocks = [block_rows(plan) for plan in plans]
    assert blocks[-1] <= blocks[0] / 4
    assert all(plan.seconds >= before.seconds for before, plan in itertools.pairwise(plans))  # less room, never sooner
    assert plans[0].storage in ("device", "half")
    assert plans[-1].storage == "recompute"
    with pytest.raises(SettingsError, match=r"10 samples of .* parameters alone need .* take fewer samples"):
        choose(rows, n_samples=10, memory_limit=10 * rows.n_columns * 4)


@pytest.mark.usefixtures("graphics_card")
def test_half_precision_is_for_float32_rows_and_loose_tolerances() -> None:
    def plan(dtype: torch.dtype, rtol: float) -> Plan:
        rows = Shape(20_000, 40_000, dtype=dtype, device="cuda")
        return choose(rows, n_samples=10, memory_limit=int(0.8 * rows.costs().full_bytes), rtol=rtol)  # half would fit

    loose = plan(torch.float32, 1e-2)
    assert loose.storage == "half"
    assert isinstance(loose.projector, Krylov)
    assert loose.projector.alternating.gram_dtype == torch.float32  # of ten-bit numbers it is exact enough
    assert plan(torch.float32, 1e-3).storage == "recompute"  # ten bits are not enough for that
    assert plan(torch.float64, 1e-2).storage == "recompute"


@pytest.mark.usefixtures("graphics_card")
def test_host_memory_is_for_a_graphics_card_and_only_as_much_as_there_is() -> None:
    rows, limit = Shape(100_000, 400_000, packed=20, device="cuda"), 5 * GIB
    kept = rows.costs().full_bytes
    assert kept > limit

    def storage(rows: Shape, host_limit: int) -> str:
        return choose(rows, n_samples=2, memory_limit=limit, rtol=1e-3, host_limit=host_limit).storage

    assert storage(rows, 2 * kept) == "host"
    assert storage(rows, kept - 1) == "recompute"
    assert storage(rows, 0) == "recompute"
    assert storage(Shape(100_000, 400_000, packed=20), 2 * kept) == "recompute"  # host memory is the limit already


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("shape", [(60_000, 20_000, 1000), (4_000, 4_000, 10), (100_000, 400, 100)])
def test_refusal_names_the_least_limit_that_would_do(shape: tuple[int, int, int], held: bool) -> None:
    rows = Shape(*shape, held=held)
    limit = 11 * 4 * rows.n_columns  # the samples fit, and hardly anything else
    with pytest.raises(SettingsError, match=r"No block .* raise memory_limit, or use .*Lanczos") as refusal:
        choose(rows, n_samples=1, memory_limit=limit)
    (least,) = re.findall(r"the least that would do is (\d+) MiB", str(refusal.value))
    assert choose(rows, n_samples=1, memory_limit=int(least) * MIB).peak_bytes <= int(least) * MIB
    with pytest.raises(SettingsError):
        choose(rows, n_samples=1, memory_limit=int(least) * MIB // 2)


def test_rows_already_in_memory_are_used_as_they_are() -> None:
    for n_rows, n_columns in [(200, 9_000), (30_000, 500), (20_000, 40_000), (60_000, 5_000)]:
        assert choose(Shape(n_rows, n_columns, held=True), n_samples=3, memory_limit=100 * GIB).storage == "device"


def test_tighter_tolerance_takes_longer() -> None:
    rows = Shape(100_000, 200_000)
    seconds = [choose(rows, n_samples=10, memory_limit=20 * GIB, rtol=rtol).seconds for rtol in (1e-1, 1e-2, 1e-3)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    examples=st.integers(1, 100_000),
    rows_per_example=st.integers(1, 20),
    n_columns=st.integers(1, 1_000_000),
    n_samples=st.integers(1, 50),
    limit=st.integers(20, 40).map(lambda power: 2**power),
    held=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rtol=st.sampled_from([1e-1, 1e-2, 1e-4]),
)
def test_plan_stays_within_its_memory_or_is_refused(
    examples: int,
    rows_per_example: int,
    n_columns: int,
    n_samples: int,
    limit: int,
    held: bool,
    dtype: torch.dtype,
    rtol: float,
) -> None:
    rows = Shape(examples * rows_per_example, n_columns, rows_per_example, held=held, dtype=dtype)
    try:
        plan = choose(rows, n_samples=n_samples, memory_limit=limit, rtol=rtol)
    except SettingsError as refusal:
        if "take fewer samples" in str(refusal):
            assert limit < 16 * n_samples * n_columns * dtype.itemsize
            return
        (least,) = re.findall(r"the least that would do is (\d+) MiB", str(refusal))
        assert int(least) * MIB > limit
        choose(rows, n_samples=n_samples, memory_limit=int(least) * MIB, rtol=rtol)
        return
    assert plan.peak_bytes <= plan.memory_limit == limit
    assert plan.peak_bytes >= n_samples * n_columns * dtype.itemsize
    assert plan.working_bytes > 0
    if held:
        assert plan.storage == "device"
    if plan.storage == "half":
        assert dtype == torch.float32
        assert rtol > 1e-4
    if isinstance(plan.projector, Krylov | Alternating):
        assert rows_per_example <= block_rows(plan) <= rows.n_rows
        assert block_rows(plan) % rows_per_example == 0
        assert plan.projector.rtol == rtol


def test_plan_prints_what_it_would_do() -> None:
    plan = choose(Shape(60_000, 20_000), n_samples=10, memory_limit=GIB)
    text = str(plan)
    assert "60,000 rows over 20,000 parameters, 10 samples" in text
    assert str(plan.projector) in text
    assert plan.reason in text
    assert "formed again" in text
    assert "of 1.00" in text
    assert "held in memory" in str(choose(Shape(50, 200), n_samples=10, memory_limit=GIB))


@pytest.mark.parametrize("gib", [16, 1])  # rows are held, or formed again in every sweep
def test_what_the_network_computes_to_form_rows_takes_time(gib: int) -> None:
    quick, slow = (Shape(20_000, 50_000, 10, example_bytes=2**16, example_flops=flops) for flops in (0.0, 1e9))
    plans = [choose(rows, n_samples=5, memory_limit=gib * GIB) for rows in (quick, slow)]
    once = 2_000 * 1e9 / (0.3 * rates_of(torch.device("cpu")).single)
    more = plans[1].seconds - plans[0].seconds
    assert more == pytest.approx(once) if plans[1].storage == "device" else more > 5 * once


def test_a_larger_block_does_not_pay_where_it_leaves_no_room_to_form_rows(graphics_card: None) -> None:
    options = {"n_samples": 30, "memory_limit": int(119 * GIB), "rtol": 1e-2}
    free, chunked = (  # few working bytes make many chunks
        choose(Shape(150_000, 269_722, 10, device="cuda", example_bytes=size), **options) for size in (0, 2**26)
    )
    assert free.storage == chunked.storage == "half"
    assert block_rows(chunked) < block_rows(free)
    assert chunked.working_bytes > free.working_bytes
