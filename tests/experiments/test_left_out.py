"""A method that a study cannot fit is left out, with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.experiments import digits, judging
from nullbayes.experiments.frame import Settings, Store
from nullbayes.experiments.study import Sizes

N, ANGLES, KEY = 20, (0.0, 90.0), "LeNet, mnist"
pytestmark = pytest.mark.usefixtures("ordinary_default")


def test_method_that_cannot_be_fitted_is_left_out_with_its_reason(blobs: Path, tmp_path: Path) -> None:
    sizes = Sizes(
        n=N, epochs=1, held_out=40, test=20, shifted=10, samples=3, patience=0.0,
        only=("MAP", "ProjectedPosterior"),
    )  # fmt: skip
    found = digits.study("mnist", Settings(data=blobs, store=Store(tmp_path), seeds=1), sizes, ANGLES)
    assert "more than the 0 s allowed" in found["subjects"][0]["runs"][0]["methods"]["ProjectedPosterior"]["failed"]
    assert json.loads((tmp_path / "steps" / KEY / "seed 0" / "ProjectedPosterior.json").read_text())["results"] == {
        "failed": found["subjects"][0]["runs"][0]["methods"]["ProjectedPosterior"]["failed"], "again": False,
    }  # fmt: skip
    page = digits.EXPERIMENTS["mnist"].page(found)
    assert any("Left out: ProjectedPosterior" in said for said in page.sections[0].paragraphs)


def test_full_covariance_is_left_out_where_neither_of_its_matrices_can_be_factored(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(n=N, epochs=1, held_out=40, test=20, shifted=10, samples=3, only=("MAP", "LinearizedLaplace"))

    def method(folder: str, largest: int) -> Any:
        monkeypatch.setattr(judging, "LARGEST_EXACT", largest)
        found = digits.study("mnist", Settings(data=blobs, store=Store(tmp_path / folder), seeds=1), sizes, ANGLES)
        return found["subjects"][0]["runs"][0]["methods"]["LinearizedLaplace"]

    assert "failed" not in method("fits", N * 10)
    refused = method("too large", N * 10 - 1)["failed"]
    assert refused.startswith("The matrix of its 44,426 parameters has 16 GB, that of its 200 rows 0 GB, and")


def refused_for_memory() -> Exception:
    """Return the error of a fit that has no smaller plan."""
    error = nb.errors.SettingsError("Memory ran out although no plan takes less.")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    return error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA: none.\nTried."), MemoryError(), refused_for_memory()])
def test_method_without_memory_is_left_out_once_and_tried_again_at_the_next_start(
    error: Exception, blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(n=N, epochs=1, held_out=40, test=20, shifted=10, samples=3, only=("MAP", "KNN"))
    said: list[str] = []

    def run() -> Any:
        settings = Settings(data=blobs, store=Store(tmp_path, said.append), seeds=1)
        return digits.study("mnist", settings, sizes, ANGLES)

    def without_memory(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(nb.detectors.KNN, "fit", without_memory)
        found = run()
    page = digits.EXPERIMENTS["mnist"].page(found)
    assert any("Left out: KNN." in paragraph for paragraph in page.sections[0].paragraphs)

    said.clear()
    again = run()["subjects"][0]["runs"][0]["methods"]
    assert {line.rsplit("/", 1)[1] for line in said if "done before" not in line} == {
        "KNN: it failed before, so this step is done again"
    }
    assert "failed" not in again["KNN"]
    said.clear()
    run()
    assert all(line.endswith("done before") for line in said)
