"""What a projector does about memory: blocks of half as many rows, and advice where there are none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos, Projection, Projector


def rows_of(rows_per_example: int = 1) -> nb.Rows:
    rows = nb.DenseRows(torch.eye(12, 20))
    rows.rows_per_example = rows_per_example
    return rows


def sizes(projector: Projector | None, rows: nb.Rows) -> list[int | None]:
    found = []
    while projector is not None:
        found.append(projector.block_size(rows))
        projector = projector.smaller(rows)
    return found


@pytest.mark.parametrize("around", [lambda blocks: blocks, Krylov])
def test_blocks_are_halved_until_one_example_is_left(around: Callable[[Alternating], Projector]) -> None:
    assert sizes(around(Alternating()), rows_of()) == [12, 6, 3, 1]
    assert sizes(around(Alternating(block_rows=8)), rows_of()) == [8, 4, 2, 1]
    assert sizes(around(Alternating()), rows_of(rows_per_example=4)) == [12, 6, 4]


def test_other_settings_stay() -> None:
    smaller = Krylov(Alternating(coarse=2), rtol=1e-3).smaller(rows_of())
    assert smaller == Krylov(Alternating(coarse=2, block_rows=6), rtol=1e-3)


@pytest.mark.parametrize(
    ("projector", "advice"),
    [
        (Alternating(), "lower n_samples"),
        (Alternating(coarse=3), "lower coarse"),
        (Krylov(), "lower n_samples"),
        (Krylov(Alternating(coarse=3)), "lower coarse"),
        (Lanczos(), "lower rank"),
        (ExactDual(), "block_rows"),
        (ExactPrimal(), "block_rows"),
    ],
    ids=str,
)
def test_advice_names_the_setting_that_takes_the_memory(projector: Projector, advice: str) -> None:
    assert advice in projector.memory_advice


@pytest.mark.parametrize("projector", [ExactDual(), ExactPrimal(), Lanczos()], ids=str)
def test_method_without_blocks_cannot_be_smaller(projector: Projector) -> None:
    assert sizes(projector, rows_of()) == [None]


def test_projector_of_a_user_takes_part() -> None:
    class Mine(Projector):
        def _prepare(self, rows: nb.Rows) -> nb.Rows:
            return rows

        def _apply(self, state: nb.Rows, noise: Tensor, *_: Any) -> Projection:
            raise NotImplementedError

    assert sizes(Mine(), rows_of()) == [None]
    assert Mine().memory_advice == "lower n_samples"
