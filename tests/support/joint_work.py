"""What the processes of tests/distributed do: all of it on the CPU, whatever the default device of the tests is."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.distributed import Group, resolve
from nullbayes.linalg.held import HeldRows
from nullbayes.linalg.normal import normal_matrix
from nullbayes.linalg.pieces import DensePiece
from nullbayes.linalg.shared import JointRows
from nullbayes.projectors import Alternating, Krylov, Projection, Projector
from nullbayes.testing import cases
from support.projector_table import PROJECTORS, S

CASES = {case.name: case for case in cases("cpu")}
MATRICES = ("full_rank", "zero_rows", "tall_rank_deficient")
ROUGH = Krylov(Alternating(block_rows=1000), rtol=1e-2)
EDGES = {2: (0.0, 0.35, 1.0), 4: (0.0, 0.2, 0.45, 0.7, 1.0)}  # shares of the rows: processes have unequal parts


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise_for(matrix: Tensor) -> Tensor:
    drawn = torch.randn(S, matrix.shape[1], generator=seeded(0), dtype=torch.float64, device="cpu")
    return drawn.to(matrix.device)


def spread(matrix: Tensor, block_rows: int, group: Group) -> JointRows:
    start, stop = (round(share * len(matrix)) for share in EDGES[group.size][group.rank :][:2])
    own = nb.DenseRows(matrix[start : max(stop, start + 1)] if start < len(matrix) else matrix[:1], block_rows)
    own.n_rows = stop - start  # which may be none
    return JointRows(own, group)


def halved(rows: nb.Rows) -> nb.Rows:
    """The rows in half precision; where there are none, the same ones, as they are when nothing is held."""
    if not rows.n_rows:
        return rows
    matrix = rows.dense()
    size = {"n_rows": rows.n_rows, "n_columns": rows.n_columns}
    return HeldRows([DensePiece(matrix, 0).halved()], **size, like=matrix, reference=rows)


def products(rank: int) -> dict[str, Tensor]:
    group, found = resolve("data"), {}
    for name in (*MATRICES, "single_row"):
        case = CASES[name]
        rows = spread(case.matrix, 3, group)
        vectors = noise_for(case.matrix)
        found |= {
            f"{name} mv": rows.mv(vectors),
            f"{name} rmv": rows.rmv(rows.mv(vectors)),
            f"{name} norms": rows.norms(vectors),
            f"{name} lengths": rows.lengths(),
            f"{name} gram": rows.gram(torch.float64),
            f"{name} dense": rows.dense(),
            f"{name} normal": normal_matrix(rows, rows.unit_scale()),
        }
        half = JointRows(halved(rows.own), group)
        found |= {f"{name} half": half.dense(), f"{name} reference": half.reference.dense()}
    return found


def everything(
    rank: int, names: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[tuple[str, str], tuple[Tensor, Tensor]]]:
    return products(rank), projections(names)


def projections(names: tuple[str, ...]) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    group, found = resolve("data"), {}
    for case_name in MATRICES:
        case = CASES[case_name]
        rows = spread(case.matrix, case.block_rows or 3, group)
        for name in names:
            if "Alternating" in name and (group.size > 2 or case_name != "full_rank"):
                continue  # which converges slowly
            projection = solve(PROJECTORS[name](1e-8), rows, case.matrix)
            found[name, case_name] = projection.directions, projection.info.converged
    rough = solve(ROUGH, spread(tall(), 3, group), tall())
    return {**found, ("rough", "tall"): (rough.directions, rough.info.converged)}


def tall() -> Tensor:
    """More rows than columns, without a null space: what is left of noise depends on every step."""
    decay = torch.logspace(0, -4, 20, dtype=torch.float64, device="cpu")
    return torch.randn(60, 20, generator=seeded(5), dtype=torch.float64, device="cpu") * decay


def solve(projector: Projector, rows: nb.Rows, matrix: Tensor) -> Projection:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return projector.apply(projector.prepare(rows), noise_for(matrix))
