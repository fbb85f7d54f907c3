"""Regressions are judged in the unit of their target, and conformal intervals hold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nullbayes.experiments import uci
from nullbayes.experiments.frame import Missing, Settings
from nullbayes.experiments.tasks import uci_regression
from support.data_folders import write_regression

SIZES = uci.Sizes(names=("yacht",), splits=5, steps=70, samples=6, members=2)
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_regression(folder, "yacht", 255, splits=2)
    return folder


@pytest.fixture(scope="module")
def results(data: Path) -> dict:
    return uci.run(Settings(data=data), SIZES)


@pytest.mark.slow
def test_every_method_is_judged_on_every_split(results: dict) -> None:
    splits = results["splits"]["yacht"]
    assert list(splits) == ["0", "1"]  # as many as there are
    for split in splits.values():
        assert list(split["plain"]) == list(uci.KINDS)
        for found in split["plain"].values():
            assert all(map(math.isfinite, found.values()))
            assert 0.0 <= found["coverage"] <= 1.0
        network, projected = split["plain"]["network"], split["plain"]["projected"]
        assert projected["rmse"] == pytest.approx(network["rmse"], rel=1e-4)  # linearized samples have its mean
        assert network["std"] == 0.0 < projected["std"] < split["plain"]["linearized Laplace"]["std"]
        corrected = split["plain"]["network, corrected noise"]
        assert corrected["noise"] == pytest.approx(projected["noise"], rel=1e-4)
        assert network["noise"] < corrected["noise"]
        for found in split["conformal"].values():
            assert found["n"] == 51
            assert found["held out"] == 40
            assert found["coverage"] >= 0.7


def test_errors_have_the_unit_of_the_target(data: Path, results: dict) -> None:
    rows = np.loadtxt(data / "uci" / "yacht" / "data.txt")
    train, test = (np.loadtxt(data / "uci" / "yacht" / f"index_{side}_1.txt").astype(int) for side in ("train", "test"))
    mean, spread = rows[train].mean(0), rows[train].std(0)
    assert uci.target_unit(data, "yacht", 1) == pytest.approx(spread[2])
    task = uci_regression(Settings(data=data, seed=1), "yacht", 1, 70 // 7)
    x = torch.tensor((rows[test, :2] - mean[:2]) / spread[:2], dtype=torch.float32)
    predicted = task.model(x).detach().numpy()[:, 0] * spread[2] + mean[2]
    error = np.sqrt(np.mean((predicted - rows[test, 2]) ** 2))
    found = results["splits"]["yacht"]["1"]["plain"]["network"]
    assert found["rmse"] == pytest.approx(error, rel=1e-4)
    sigma = found["noise"]
    nll = np.mean(0.5 * np.log(2 * np.pi * sigma**2) + (predicted - rows[test, 2]) ** 2 / (2 * sigma**2))
    assert found["nll"] == pytest.approx(nll, rel=1e-4)


def test_page_has_a_section_for_each_table(results: dict) -> None:
    page = uci.page(results)
    [_, yacht] = page.sections
    assert [row[0] for row in yacht.blocks[0].rows] == list(uci.KINDS)
    assert [row[0] for row in yacht.blocks[1].rows] == list(uci.CONFORMAL)
    assert yacht.blocks[0].rows[0][1].spread > 0.0
    worst = {"rmse": 1e9, "nll": 1e9, "crps": 1e9, "coverage": 0.0}
    for split in results["splits"]["yacht"].values():
        split["plain"] = {method: {**found, **worst} for method, found in split["plain"].items()}
        split["plain"]["last-layer Laplace"] |= {"rmse": 1.0, "nll": 1.0, "crps": 1.0, "coverage": 0.9}
        split["conformal"]["projected"]["coverage"] = 0.1
    said = uci.page(results).sections[1].paragraphs
    assert said[0].count("last-layer Laplace") == 4
    assert "misses 90% by more than three standard errors" in said[1]
    assert "with projected." in said[1]


def test_missing_tables_are_named() -> None:
    with pytest.raises(Missing, match=r"uci/concrete/data.txt.*--data"):
        uci.run(Settings(), uci.QUICK)
