"""The table of projectors: each is applied once to every case, with the dense answer beside it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov, Lanczos, Projection, Projector, Sketched
from nullbayes.testing import Case, cases, kernel_projector
from support.drawing import randn

RTOL = 1e-8
S = 5
CASES = {case.name: case for case in cases(torch.get_default_device())}
PROJECTORS: dict[str, Callable[[float], Projector]] = {
    "ExactDual": lambda rtol: ExactDual(rtol=rtol),
    "ExactDual, truncated": lambda rtol: ExactDual(truncate=True, rtol=rtol),
    "ExactPrimal": lambda rtol: ExactPrimal(rtol=rtol),
    "ExactPrimal, truncated": lambda rtol: ExactPrimal(truncate=True, rtol=rtol),
    "Alternating": lambda rtol: Alternating(rtol=rtol),
    "Krylov": lambda rtol: Krylov(rtol=rtol),
    "Alternating, shifted": lambda rtol: Alternating(rtol=rtol, shift=1e-2),
    "Krylov, shifted": lambda rtol: Krylov(Alternating(shift=1e-2), rtol=rtol),
    "Alternating, coarse": lambda rtol: Alternating(rtol=rtol, coarse=8),
    "Krylov, coarse": lambda rtol: Krylov(Alternating(coarse=8), rtol=rtol),
    "Alternating, one block": lambda rtol: Alternating(rtol=rtol, block_rows=1000),
    "Krylov, one block": lambda rtol: Krylov(Alternating(block_rows=1000), rtol=rtol),
    "Sketched": lambda rtol: Sketched(rtol=rtol),
    "Lanczos": lambda rtol: Lanczos(rtol=rtol),
}
WELL_CONDITIONED = (
    "full_rank", "orthogonal_blocks", "repeated_rows", "zero_rows", "single_row", "one_block", "more_rows_than_columns",
    "tall_rank_deficient",
)  # fmt: skip


def stalls(name: str, case: str) -> bool:
    if name.endswith("one block"):
        return case == "power_law"  # no angles between blocks to be slow at; rounding is left
    return name.split(",")[0] in CASES[case].stalls


def pairs(keep: Callable[[str, str], bool] = lambda name, case: True) -> pytest.MarkDecorator:
    """All projectors on all cases that are kept."""
    kept = [(name, case) for name in PROJECTORS for case in CASES if keep(name, case)]
    return pytest.mark.parametrize(("name", "case"), kept, ids=[f"{name}-{case}" for name, case in kept])


every_pair = pairs()
every_projector = pytest.mark.parametrize("name", PROJECTORS)


@dataclass(frozen=True)
class Solved:
    case: Case
    projector: Projector
    state: object
    noise: Tensor
    result: Projection
    warned: list[warnings.WarningMessage]
    calls: list[tuple[int, Tensor]]

    @property
    def before(self) -> Tensor:
        return (self.noise @ self.case.matrix.T).norm(dim=1)

    @property
    def after(self) -> Tensor:
        return (self.result.directions @ self.case.matrix.T).norm(dim=1)


def compared_with(name: str, matrix: Tensor, noise: Tensor) -> Tensor:  # (S,)
    """What the residual is relative to: |A noise|, and its mean over noise of that length for what is truncated."""
    before = (noise.double() @ matrix.double().T).norm(dim=1)
    if "truncated" not in name:
        return before
    expected = matrix.double().norm() * noise.double().norm(dim=1) / matrix.shape[1] ** 0.5
    return torch.where(before > 0, torch.maximum(before, expected), before)


def gaussian(n: int, columns: int, seed: int = 0) -> Tensor:
    return randn(n, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cache
def solve(name: str, case_name: str) -> Solved:
    case = CASES[case_name]
    projector = PROJECTORS[name](RTOL)
    state = projector.prepare(nb.DenseRows(case.matrix, case.block_rows))
    noise = gaussian(S, case.matrix.shape[1])
    calls: list[tuple[int, Tensor]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = projector.apply(state, noise.clone(), callback=lambda k, r: calls.append((k, r.clone())))
    return Solved(case, projector, state, noise, result, warned, calls)


def unit_rows(matrix: Tensor) -> Tensor:
    lengths = matrix.norm(dim=1, keepdim=True)
    return matrix / torch.where(lengths > 0, lengths, 1.0)


@cache
def oracle(case_name: str) -> Tensor:
    """The dense projector; from unit rows, which have the same kernel and the better condition."""
    return kernel_projector(unit_rows(CASES[case_name].matrix))


def smallest(matrix: Tensor) -> float:
    """The smallest singular value that is not rounding."""
    sigma = torch.linalg.svdvals(matrix)
    return float(sigma[sigma > 1e-13 * sigma[0]][-1]) if sigma[0] > 0 else 1.0


@cache
def condition(case_name: str) -> float:
    unit = unit_rows(CASES[case_name].matrix)
    return float(torch.linalg.matrix_norm(unit, 2)) / smallest(unit)


def rounding(name: str, case_name: str, eps: float = 2.0**-52) -> float:
    """What rounding may put into the kernel, relative to the noise."""
    if name == "Lanczos":
        return 1e4 * eps**0.5
    tall = len(CASES[case_name].matrix) > CASES[case_name].matrix.shape[1]
    if name.endswith("one block") and tall:  # by the factor of the normal matrix, which is allowed that much
        return 2 * max(8 * eps, 1e-10)
    if name == "Sketched" and tall:  # by the factor of a part of the rows, over and over
        return 1e4 * eps * condition(case_name)
    power = 2 if name.startswith("ExactPrimal") else 1  # the eigenvectors of A⊤A see the squared condition
    return min(1e3 * eps * condition(case_name) ** power, 1e-2)
