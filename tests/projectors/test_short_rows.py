"""Loss rows that are short compared with the others are left out: the null space stays large, the residual small."""

from __future__ import annotations

import pytest
import torch

import nullbayes as nb
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Projector
from support.drawing import randn

LONG, SHORT, COLUMNS = 20, 30, 80


def rows_of(columns: int = COLUMNS, *, spares: bool, ratio: float = 1e-6) -> nb.DenseRows:
    matrix = randn(LONG + SHORT, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix[LONG:] *= ratio
    rows = nb.DenseRows(matrix)
    rows.spares_short_rows = spares
    return rows


each_projector = pytest.mark.parametrize(
    ("projector", "columns"),
    [
        pytest.param(Krylov(rtol=1e-2), COLUMNS, id="one block"),
        pytest.param(Krylov(Alternating(block_rows=25), rtol=1e-2), COLUMNS, id="two blocks"),
        pytest.param(ExactDual(truncate=True, rtol=1e-2), COLUMNS, id="dual"),
        pytest.param(ExactPrimal(truncate=True, rtol=1e-2), 45, id="primal"),
        pytest.param(Krylov(rtol=1e-2), 45, id="normal matrix"),
    ],
)


@each_projector
def test_short_rows_do_not_reduce_the_null_space_dimension(projector: Projector, columns: int) -> None:
    noise = randn(40, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    for spares in (True, False):
        rows = rows_of(columns, spares=spares)
        projection = projector.apply(projector.prepare(rows), noise)
        assert projection.info.converged.all()  # the tolerance is about all rows, as long as they are
        found[spares] = projection.info.kernel_dimension
    assert found[True] == pytest.approx(columns - LONG, abs=3)
    assert found[False] < columns - LONG - 15


def test_rows_that_are_not_short_are_projected_as_before() -> None:
    noise = randn(5, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spared, held = (
        Krylov(rtol=1e-2).apply(Krylov(rtol=1e-2).prepare(rows_of(spares=spares, ratio=0.5)), noise).directions
        for spares in (True, False)
    )
    assert torch.equal(spared, held)


def test_short_rows_are_spared_for_losses_and_not_for_outputs() -> None:
    assert nb.LossJacobian.spares_short_rows
    assert not nb.OutputJacobian.spares_short_rows
    x = randn(6, 2, generator=torch.Generator().manual_seed(0))
    rows = nb.LossJacobian(torch.nn.Linear(2, 3), [(x, torch.zeros(6, dtype=torch.long))])
    assert all(rows.stored(storage).spares_short_rows for storage in ("device", "half", "recompute", "matrix_free"))
