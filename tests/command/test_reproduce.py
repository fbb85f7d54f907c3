"""``nullbayes reproduce`` passes on what was typed, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nullbayes.command import main
from nullbayes.experiments import names
from nullbayes.experiments.frame import Missing


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the runner, which has tests of its own and takes minutes."""
    calls: list[Any] = []

    def reproduce(name: str, folder: Path, **options: Any) -> Path:
        options.pop("say")("a step")
        calls.append((name, folder, options))
        if name == "vae":
            msg = "MNIST is not there: pass --data FOLDER."
            raise Missing(msg)
        return folder / name

    monkeypatch.setattr("nullbayes.experiments.running", SimpleNamespace(reproduce=reproduce), raising=False)
    monkeypatch.delenv("NULLBAYES_DATA", raising=False)
    return calls


def test_defaults_are_a_full_run(called: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "toy"]) == 0
    full = {"data": None, "device": torch.device("cpu"), "quick": False, "seeds": 3, "methods": (), "fresh": False}
    assert called == [("toy", Path("results"), full | {"earlier": None})]
    printed = capsys.readouterr()
    assert printed.out.startswith(f"The page is {Path('results/toy/index.html')}, ")
    assert str(Path("results/toy/results.json")) in printed.out
    assert printed.err == "a step\n"


def test_options_are_passed_on(
    called: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULLBAYES_DATA", str(tmp_path))
    earlier = tmp_path / "results.json"
    earlier.write_text("{}")
    asked = ["--quick", "--seeds", "1", "--methods", "SCOD, KNN", "--fresh", "-o", str(tmp_path), "--json"]
    asked += ["--from", str(earlier)]
    assert main(["reproduce", "mnist", *asked]) == 0
    quick = {"data": tmp_path, "device": torch.device("cpu"), "quick": True, "seeds": 1, "fresh": True}
    assert called == [("mnist", tmp_path, {**quick, "methods": ("SCOD", "KNN"), "earlier": earlier})]
    folder = tmp_path / "mnist"
    files = {"page": str(folder / "index.html"), "figures": str(folder / "results.json")}
    assert json.loads(capsys.readouterr().out) == {"experiment": "mnist", "folder": str(folder), **files}


def test_without_a_name_it_says_what_each_experiment_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    printed = capsys.readouterr()
    heads = [line.split()[0] for line in printed.out.splitlines() if not line.startswith(" ")]
    assert heads == names()
    assert "Needs celeba, food-101, pillow." in " ".join(printed.out.split())
    assert "nullbayes reproduce NAME --quick" in printed.err
    assert main(["reproduce", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == names()


def test_what_is_missing_is_one_line(called: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "vae"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "nullbayes: MNIST is not there: pass --data FOLDER."
