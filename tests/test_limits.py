"""Chunk sizes per device, and what rows cost: temporary memory stays within the working bytes that a plan allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nullbayes.limits import LIMITS, PieceCosts, RowCosts, limits, normal_bytes, panel_bytes, panel_columns, tile_rows
from support.limited import limited

CPU = torch.device("cpu")
STORAGES = ("device", "half", "host", "recompute", "matrix_free")


def costs(
    storage: str, n_examples: int = 100, each: int = 3, row_bytes: int = 800, example_bytes: int = 5000
) -> RowCosts:
    """What rows of 200 columns cost that have to be formed, unless ``example_bytes`` is 0."""
    full = n_examples * row_bytes
    return RowCosts(
        n_rows=n_examples * each,
        n_columns=200,
        rows_per_example=each,
        dtype=torch.float32,
        device=CPU,
        working_bytes=2**20,
        storage=storage,
        pieces=(PieceCosts(full, 10.0, 20.0, 4.0, 8.0), PieceCosts(full, 1.0, 2.0, vector_bytes=16.0)),
        full_bytes=full,
        held_bytes={"device": full, "host": full, "half": full // 2}.get(storage, 0),
        normal_flops=1e6,
        numbers_per_row=row_bytes // each // 4,
        example_bytes=example_bytes,
    )


def test_a_device_that_is_not_in_the_table_has_the_limits_of_a_cpu() -> None:
    assert limits(torch.device("meta")) == limits(CPU) == LIMITS["cpu"]
    assert limits(torch.device("cuda")) == LIMITS["cuda"] != LIMITS["cpu"]


def test_tiles_and_panels_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, tile_rows=70, panel_columns=40)
    assert tile_rows(CPU, 2**40) == 70
    assert tile_rows(CPU, 48 * 9**2) == 9  # three float64 tiles in half of the bytes
    assert tile_rows(CPU, 0) == 1
    assert [panel_columns(size, CPU) for size in (10, 40, 10_000)] == [10, 40, 40]
    assert panel_bytes(100, torch.float64, CPU) == 8 * (100 * 40 + 3 * 40**2)
    assert normal_bytes(1000, CPU) == 2 * 1000**2


def test_operations_are_summed_over_the_columns_and_temporary_bytes_are_not() -> None:
    found = costs("device")
    assert (found.gram_flops, found.product_flops) == (11.0, 22.0)
    assert found.transient_bytes(2**30, 10, 1)[1] == 10 * 16
    assert found.transient_bytes(2**30, 10, 0)[1] == 10 * 4


def test_gram_matrices_from_halves_take_all_the_room_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (False, True):
        monkeypatch.setattr("nullbayes.limits.half_is_fast", lambda _, fast=fast: fast)
        whole = [storage for storage in STORAGES if costs(storage).transient_bytes(2**30, 10, 1)[0] == 2**30]
        assert whole == (["half"] if fast else [])


@pytest.mark.parametrize("storage", STORAGES)
def test_only_rows_on_the_device_take_its_memory(storage: str) -> None:
    assert costs(storage).device_bytes == {"device": 80_000, "half": 40_000}.get(storage, 0)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_that_need_not_be_formed_need_no_memory_to_form_them(storage: str) -> None:
    found = costs(storage, example_bytes=0)
    assert found.least_working_bytes(1000) == 2**16
    assert found.forming_bytes(2**20) == found.forming_chunks(2**20) == 0


def test_rows_are_formed_in_as_many_chunks_as_memory_asks_for() -> None:
    assert [costs("device").forming_chunks(working) for working in (1, 5000, 10_000, 2**30)] == [100, 100, 50, 1]
    assert costs("half").forming_chunks(10_000) == 100
    assert costs("recompute").forming_chunks(40_000) == 50
    assert [costs("device").forming_bytes(working) for working in (1, 12_000, 2**30)] == [5000, 10_000, 500_000]
    assert costs("recompute").forming_bytes(2**30) == costs("matrix_free").forming_bytes(2**30) == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    storage=st.sampled_from(STORAGES),
    n_examples=st.integers(1, 10_000),
    each=st.integers(1, 10),
    row_bytes=st.integers(40, 10**6),
    example_bytes=st.integers(0, 10**7),
    more=st.floats(1.0, 1000.0),
    block=st.integers(1, 10_000),
    n_vectors=st.integers(1, 100),
)
def test_temporary_memory_is_within_the_working_bytes(
    storage: str,
    n_examples: int,
    each: int,
    row_bytes: int,
    example_bytes: int,
    more: float,
    block: int,
    n_vectors: int,
) -> None:
    found = costs(storage, n_examples, each, row_bytes, example_bytes)
    working = int(more * found.least_working_bytes(n_vectors))
    block_rows = min(block, n_examples) * each
    assert max(found.transient_bytes(working, block_rows, n_vectors)) <= working
    assert found.forming_bytes(working) <= working
