"""Rows that are spread over processes multiply, and are projected on, as one matrix."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.testing import kernel_projector
from support.joint_work import CASES, MATRICES, ROUGH, everything, noise_for, solve, tall
from support.projector_table import PROJECTORS, stalls
from support.together import together

ALONE = "Sketched"  # which works in one process
QUICK = ("Krylov", "Krylov, coarse")
OTHERS = tuple(name for name in PROJECTORS if name not in (*QUICK, ALONE))


@cache
def solved(n: int, names: tuple[str, ...]) -> list[Any]:
    return together(everything, n, names)


def test_products_are_those_of_the_whole_matrix_in_every_process() -> None:
    for found, _ in solved(2, QUICK):
        for name in (*MATRICES, "single_row"):  # of a single row one process has nothing
            a = CASES[name].matrix
            vectors, lengths = noise_for(a), a.norm(dim=1)
            unit = torch.where(lengths > 0, 1.0 / lengths.clamp_min(1e-300), 0.0)[:, None] * a
            expected = {
                "mv": vectors @ a.T,
                "rmv": vectors @ a.T @ a,
                "norms": (vectors @ a.T).norm(dim=1),
                "lengths": lengths,
                "gram": a @ a.T,
                "dense": a,
                "normal": unit.T @ unit,
                "reference": a,
            }
            for what, dense in expected.items():
                torch.testing.assert_close(found[f"{name} {what}"], dense, msg=f"{name} {what}")
            assert 0.0 < (found[f"{name} half"] - a).abs().max() < 1e-2, "which the reference is not"


def test_the_normal_matrix_of_all_processes_is_used_as_that_of_one() -> None:
    alone = solve(ROUGH, nb.DenseRows(tall()), tall()).directions
    for _, found in solved(2, QUICK):
        torch.testing.assert_close(found["rough", "tall"][0], alone)


def test_projection_by_two_processes_is_the_dense_one() -> None:
    check(2, QUICK)


@pytest.mark.slow
def test_projection_by_two_processes_is_the_dense_one_for_all_projectors() -> None:
    check(2, OTHERS)


@pytest.mark.slow
def test_projection_by_four_processes_is_the_dense_one() -> None:
    check(4, tuple(name for name in PROJECTORS if "Alternating" not in name and name != ALONE))  # four times as slow


@pytest.mark.slow
def test_a_projector_for_one_process_refuses_several() -> None:
    for found in together(everything, 2, (ALONE,)):
        assert "Sketched works in one process: use projector=nb.projectors.Krylov()" in str(found)


def check(n: int, names: tuple[str, ...]) -> None:
    every = solved(n, names)
    for _, found in every:
        for (name, case), (directions, converged) in found.items():
            if case == "tall" or stalls(name, case) or "truncated" in name:
                continue
            expected = noise_for(CASES[case].matrix) @ kernel_projector(CASES[case].matrix)
            assert converged.all(), f"{name} {case}"
            torch.testing.assert_close(directions, expected, rtol=0.0, atol=1e-6, msg=f"{name} {case}")
        assert {name for name, _ in found} == {*names, "rough"}
        first = every[0][1]
        assert all(torch.equal(found[key][0], first[key][0]) for key in first), "processes differ"
