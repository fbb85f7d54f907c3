"""Derivatives that are NaN or Inf stop the work where they come up, and the error names the batch and the examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from drawing import randint, randn
from models import batches
from nullbayes.errors import ModelError
from nullbayes.jacobian.checks import check_outputs, check_rows
from nullbayes.jacobian.data import Examples

DEVICE = torch.get_default_device()
SIZES = (5, 1, 7, 6, 4)


class Root(nn.Module):
    """Finite wherever it is asked, but with no slope where its input is zero."""

    def __init__(self, *, by_layers: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4, bias=False), nn.Linear(4, 3)
        self.scale = None if by_layers else nn.Parameter(torch.ones(40, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * self.scale.mean(0)
        return self.head(self.first(x).square().sqrt())


def data(zeros: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = randn(23, 3, generator=generator, dtype=torch.float64), randint(3, (23,), generator=generator)
    x[list(zeros)] = 0.0
    return batches(x, y, SIZES)


def model(*, by_layers: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Root(by_layers=by_layers).double()


def vectors(n: int) -> Tensor:
    return randn(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


USES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "held": ("recompute", lambda rows: rows.keep()),
    "held in half precision": ("recompute", lambda rows: rows.keep(half=True)),
    "formed": ("recompute", lambda rows: rows.block(0, rows.n_rows).dense()),
    "formed part by part": ("recompute", lambda rows: rows.mv(vectors(rows.n_columns))),
    "pushed": ("matrix_free", lambda rows: rows.mv(vectors(rows.n_columns))),
    "pulled": ("matrix_free", lambda rows: rows.rmv(vectors(rows.n_rows))),
}


@pytest.mark.parametrize("kind", [nb.OutputJacobian, nb.LossJacobian])
@pytest.mark.parametrize("by_layers", [True, False])
@pytest.mark.parametrize("use", USES)
def test_rows_that_are_not_finite_are_named(use: str, by_layers: bool, kind: Any) -> None:
    storage, act = USES[use]
    rows = kind(model(by_layers=by_layers), data((8,)), storage=storage)
    rows.working_bytes = 2**14
    assert ("by layers" in rows.route) == (by_layers and storage == "recompute")
    with pytest.raises(ModelError, match=r"derivatives.*NaN or Inf on batch 2 \(its example 2, counted from 0\).*sqrt"):
        act(rows)


NAMES = {
    (8,): r"batch 2 \(its example 2, counted from 0\), where",
    (0,): r"batch 0 \(its example 0, counted from 0\), where",
    (8, 10): r"batch 2 \(its examples 2, 4, counted from 0\), where",
    (5, 22): r"batch 1 \(its example 0, counted from 0\), batch 4 \(its example 3, counted from 0\), where",
    tuple(range(6, 13)): r"batch 2 \(its examples 0, 1, 2, 3, 4 and 2 more, counted from 0\), where",
    tuple(range(3, 23)): r"batch 0 .*batch 1 .*batch 2 \(its examples 0, 1 and 5 more, .*\), and later batches, where",
}


@pytest.mark.parametrize(("zeros", "names"), NAMES.items(), ids=str)
def test_all_examples_of_a_range_are_named_or_counted(zeros: tuple[int, ...], names: str) -> None:
    with pytest.raises(ModelError, match=names):
        nb.OutputJacobian(model(), data(zeros)).keep()


@pytest.mark.parametrize("posterior", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
@pytest.mark.parametrize("storage", ["held", "formed"])
@pytest.mark.parametrize("zero", [0, 14])
def test_a_fit_says_where(zero: int, storage: str, posterior: Any) -> None:
    options: dict[str, Any] = {}
    if storage == "formed":
        options = {"projector": nb.projectors.Alternating(block_rows=6), "memory_limit": 2**12}
    where = {0: "batch 0.*example 0", 14: "batch 3.*example 1"}[zero]
    with pytest.raises(ModelError, match=f"derivatives.*{where}"):
        posterior(model()).fit(data((zero,)), 2, progress=False, **options)


def test_finite_numbers_whose_sum_overflows_are_not_refused() -> None:
    examples = Examples(data(()), None, DEVICE)
    large = torch.full((46, 10), 3e38, dtype=torch.float32)
    check_rows(examples, 0, 23, [large])
    check_outputs(examples, 0, large[:23])
    large[9, 3] = torch.inf
    with pytest.raises(ModelError, match=r"derivatives.*batch 0 \(its example 4,"):  # two rows an example
        check_rows(examples, 0, 23, [large])
    with pytest.raises(ModelError, match=r"answers NaN or Inf on batch 2 \(its example 3,"):
        check_outputs(examples, 0, large[:23])


def test_vectors_that_are_not_finite_are_not_blamed_on_the_network() -> None:
    rows = nb.OutputJacobian(model(), data(()), storage="matrix_free")
    broken = vectors(rows.n_columns)
    broken[1, 3] = torch.nan
    assert rows.mv(broken).isnan().any()
    assert rows.rmv(torch.full((1, rows.n_rows), torch.nan, dtype=torch.float64)).isnan().any()
