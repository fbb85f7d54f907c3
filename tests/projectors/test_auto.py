"""`choose` takes a direct method where one is affordable, else Krylov, never more memory than it may, and says why."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nullbayes.errors import SettingsError
from nullbayes.linalg.rows import Block, Rows
from nullbayes.projectors import ExactDual, ExactPrimal, Krylov, Plan, choose
from nullbayes.projectors.alternating import balanced_block_rows

GIB = 2**30


class Shape(Rows):
    """Rows that are nothing but their shape: a choice must not need more."""

    def __init__(self, n_rows: int, n_columns: int, granule: int = 1, held: bool = False) -> None:
        self.n_rows, self.n_columns, self.granule, self.held = n_rows, n_columns, granule, held
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def block(self, start: int, stop: int) -> Block:
        raise NotImplementedError

    def keep(self) -> Rows:
        raise NotImplementedError

    def kept_bytes(self) -> int:
        return 0 if self.held else super().kept_bytes()


def block_rows(plan: Plan) -> int:
    assert isinstance(plan.projector, Krylov)
    assert plan.projector.alternating.block_rows is not None
    return plan.projector.alternating.block_rows


@pytest.mark.parametrize(
    ("n_rows", "n_columns", "kind"),
    [
        (1, 2, ExactDual),
        (500, 40_000, ExactDual),
        (2_000, 2_001, ExactDual),
        (20_000, 40_000, Krylov),
        (60_000, 2_000, ExactPrimal),
        (100, 100, ExactPrimal),
        (1, 1, ExactPrimal),
        (60_000, 10_000, Krylov),
        (600_000, 44_426, Krylov),
    ],
)
def test_few_rows_or_few_columns_are_solved_directly(n_rows: int, n_columns: int, kind: type) -> None:
    plan = choose(Shape(n_rows, n_columns), n_samples=30, memory_limit=1000 * GIB, rtol=3e-3)
    assert type(plan.projector) is kind
    assert plan.projector.rtol == 3e-3
    if kind is not Krylov:
        assert plan.projector.truncate  # there may be no exact kernel
    assert plan.keep
    assert f"{n_rows:,}" in plan.reason or f"{n_columns:,}" in plan.reason
    assert (plan.n_rows, plan.n_parameters, plan.n_samples) == (n_rows, n_columns, 30)
    assert plan.operations > 0


def test_less_memory_means_smaller_blocks_then_rows_formed_anew_then_a_refusal() -> None:
    rows = Shape(60_000, 20_000)
    limits = (64, 16, 8, 4, 2, 1, 0.5, 0.25, 0.125)
    plans = [choose(rows, n_samples=10, memory_limit=int(limit * GIB)) for limit in limits]
    blocks = [block_rows(plan) for plan in plans]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[-1] < blocks[0] / 4
    keeps = [plan.keep for plan in plans]
    assert keeps == sorted(keeps, reverse=True)  # True first
    assert keeps[0]
    assert not keeps[-1]
    with pytest.raises(SettingsError, match=r"10 samples of 20,000 parameters alone need .* take fewer samples"):
        choose(rows, n_samples=10, memory_limit=GIB // 300)


def test_block_that_does_not_fit_is_refused_with_a_way_out() -> None:
    with pytest.raises(SettingsError, match=r"One block of 1000 rows .* raise memory_limit, or use .*Lanczos"):
        choose(Shape(60_000, 20_000, granule=1000), n_samples=1, memory_limit=GIB // 4)


def test_direct_methods_need_their_memory() -> None:
    few_rows, few_columns = Shape(2_000, 10_000, held=True), Shape(10_000, 2_000, held=True)
    for limit, kinds in [(GIB, (ExactDual, ExactPrimal)), (GIB // 10, (Krylov, Krylov))]:
        plans = [choose(rows, n_samples=1, memory_limit=limit) for rows in (few_rows, few_columns)]
        assert tuple(type(plan.projector) for plan in plans) == kinds


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    examples=st.integers(1, 100_000),
    granule=st.integers(1, 20),
    n_columns=st.integers(1, 1_000_000),
    n_samples=st.integers(1, 50),
    limit=st.integers(20, 40).map(lambda power: 2**power),
    held=st.booleans(),
)
def test_plan_stays_within_its_memory_or_is_refused(
    examples: int, granule: int, n_columns: int, n_samples: int, limit: int, held: bool
) -> None:
    rows = Shape(examples * granule, n_columns, granule, held)
    try:
        plan = choose(rows, n_samples=n_samples, memory_limit=limit)
    except SettingsError:
        # with one sample and the smallest blocks there would be no room either, or fewer samples would do
        assert (
            limit < 6 * n_samples * n_columns * 4 + 16 * rows.n_rows * granule + 16 * granule**2 + granule * n_columns
        )
        return
    assert plan.peak_bytes <= plan.memory_limit == limit
    assert plan.peak_bytes >= n_samples * n_columns * 4
    assert plan.keep or not held
    if isinstance(plan.projector, Krylov):
        assert granule <= block_rows(plan) <= max(granule, rows.n_rows)


def test_plan_prints_what_it_would_do() -> None:
    plan = choose(Shape(60_000, 20_000), n_samples=10, memory_limit=GIB)
    text = str(plan)
    assert "60,000 rows over 20,000 parameters, 10 samples" in text
    assert "Krylov(" in text
    assert plan.reason in text
    assert "formed again" in text
    assert "of 1.00" in text
    assert "held in memory" in str(choose(Shape(50, 200), n_samples=10, memory_limit=GIB))


def test_balance_takes_larger_blocks_for_more_samples_and_whole_granules() -> None:
    rows = Shape(60_000, 20_000)
    sizes = [balanced_block_rows(rows, n_samples) for n_samples in (1, 10, 100, 1000)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert balanced_block_rows(Shape(1, 10), 30) == 1
    assert balanced_block_rows(Shape(300_000, 10, granule=30_000), 1) == 30_000
