"""The examples run, and show what they say they show."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers.*")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Any:
    with torch.random.fork_rng(devices=()):
        yield


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_names_every_example() -> None:
    written = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.glob("*.py")} == {
        line.split("`")[1] for line in written.splitlines() if line.startswith("| `")
    }


def test_regression() -> None:
    found = example("regression").main()
    assert len(found) == 2
    for name, row in found.items():
        assert 0.78 <= row["coverage"] <= 1.0, name
        assert 0.8 <= row["calibrated coverage"] < 1.0, name
        assert row["std far away"] > 2 * row["std"], name
        assert row["flagged"] < 0.15, name
        assert row["flagged far away"] > 0.9, name


def test_images() -> None:
    found = example("images").main(n=300, epochs=12)
    for reason in ("random order", "drops its last 44 examples", "random augmentation", "nb.evaluation_loader(loader)"):
        assert reason in found["refused"]
    assert found["n_data"] == 300
    assert found["check"].accuracy_posterior >= found["check"].accuracy_model - 0.003
    assert found["check"].nll_posterior <= found["check"].nll_model + 0.005
    assert found["auroc"] > 0.8
    assert found["false alarms"] < 0.1
    assert found["flagged"] > 0.4


def test_segmentation() -> None:
    found = example("segmentation").main(n=20, epochs=60)
    assert found["accuracy"] == found["accuracy of the network"] > 0.95
    assert found["auroc"] > 0.9
    assert found["inside"] > 2 * found["outside"]
    assert found["alarms"] < 0.2
    assert found["flagged"] > 0.9


def test_text() -> None:
    pytest.importorskip("transformers")
    found = example("text").main(n=30, steps=80)
    classifier, language = found["classifier"], found["language"]
    assert classifier["accuracy"] == classifier["accuracy of the network"] > 0.9
    assert language["refused"] == 1.0
    assert language["nll"] == pytest.approx(language["own loss"], rel=1e-3)
    assert min(classifier["auroc"], language["auroc"]) > 0.7
    assert classifier["false alarms"] < 0.25
    assert classifier["flagged"] > 0.3


def test_serving() -> None:
    found = example("serving").main(n=300, times=5)
    assert found["error"] < 1e-3
    assert found["false alarms"] < 0.03
    assert found["flagged noise"] > 0.8
