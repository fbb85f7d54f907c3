"""The examples run, and show what they say they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.user_folder import imported

FOLDER = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers.*")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Any:
    with torch.random.fork_rng(devices=()):
        yield


def test_the_list_names_every_example() -> None:
    written = (FOLDER / "README.md").read_text()
    assert {path.name for path in FOLDER.glob("*.py")} == {
        line.split("`")[1] for line in written.splitlines() if line.startswith("| `")
    }


@pytest.mark.slow
def test_text() -> None:
    pytest.importorskip("transformers")
    found = imported(FOLDER / "text.py").main(n=30, steps=80)
    assert found["refused"] == 1.0
    assert found["nll"] == pytest.approx(found["own loss"], rel=1e-3)
    assert found["auroc"] > 0.7
