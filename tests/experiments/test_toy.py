"""Between the data, fully correlated posteriors are less certain than on them, and a diagonal one is not."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from nullbayes.experiments import toy
from nullbayes.experiments.frame import Settings

SIZES = toy.Sizes(n=40, steps=400, samples=60, points=29)
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def results() -> dict:
    return toy.run(Settings(seeds=2), SIZES)


def test_uncertainty_in_the_gap(results: dict) -> None:
    for seed in results["methods"].values():
        for name in ("projected", "loss-projected", "linearized Laplace"):
            assert seed[name]["in gap"] > 3 * seed[name]["on data"]
        assert 3 * seed["diagonal Laplace"]["ratio"] < seed["projected"]["ratio"]
        assert seed["diagonal Laplace"]["on data"] > 1.5 * seed["linearized Laplace"]["on data"]
        assert seed["projected"]["on data"] < 0.05
        for found in seed.values():
            assert all(map(math.isfinite, [*found["mean"], *found["std"], found["rmse"]]))
            assert len(found["mean"]) == len(found["std"]) == len(results["grid"]) == SIZES.points
            assert found["ratio"] == pytest.approx(found["in gap"] / found["on data"])


def test_data_have_a_gap() -> None:
    x, y = toy.data(50, torch.Generator().manual_seed(0))
    assert x.abs().min() >= toy.GAP
    assert x.abs().max() <= toy.EDGE
    assert (x < 0).sum() == 25
    assert x.shape == y.shape == (50, 1)
    assert sum(p.numel() for p in toy.network().parameters()) == 141


def test_page_says_what_the_numbers_say(results: dict) -> None:
    page = toy.page(results)
    ratios = [seed["projected"]["ratio"] for seed in results["methods"].values()]
    assert f"{statistics.fmean(ratios):.1f} times as uncertain" in page.lead
    table, curves = page.sections[0].blocks[0], page.sections[1].blocks
    assert [row[0] for row in table.rows] == list(toy.MEANING)
    assert table.rows[0][1].spread == pytest.approx(statistics.stdev(ratios))
    assert len(curves) == 6
    first = results["methods"]["0"]["projected"]
    middle, upper, lower, points = curves[0].series
    assert (middle.y, middle.spread, points.points_only) == (first["mean"], first["std"], True)
    for i in range(SIZES.points):
        assert upper.y[i] - lower.y[i] == pytest.approx(4 * first["std"][i], rel=1e-6, abs=1e-9)
    said = " ".join(page.sections[0].paragraphs)
    assert "than both sparse approximations in all 2 seeds" in said
    for seed in results["methods"].values():  # the opposite numbers are told the opposite
        seed = seed["projected"]
        seed["ratio"], seed["in gap"] = 0.5, seed["on data"] / 2
    assert "than both sparse approximations in none of 2 seeds" in " ".join(toy.page(results).sections[0].paragraphs)
