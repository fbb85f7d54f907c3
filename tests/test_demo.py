"""The demonstration, small: what it measures, prints and draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from nullbayes import demo
from nullbayes.command import demo as command
from nullbayes.command import main
from nullbayes.demo import Digits


@pytest.fixture(scope="module")
def digits() -> Digits:
    every = demo.load_digits()
    return Digits(every.x_train[:90], every.y_train[:90], every.x_test, every.y_test, every.x_unseen)


@pytest.fixture(scope="module")
def lines(digits: Digits) -> list[demo.Line]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = demo.train_on_digits(digits, steps=200)
    return demo.compare(model, digits)


def test_unseen_digits_are_neither_trained_nor_tested_on() -> None:
    every = demo.load_digits()
    assert every.y_train.max() == every.y_test.max() == demo.KNOWN - 1
    assert len(every.x_train) + len(every.x_test) + len(every.x_unseen) == 1797


def test_projected_posterior_keeps_the_accuracy_and_beats_the_network_on_unseen_digits(lines: list[demo.Line]) -> None:
    network, projected, loss_projected = lines
    assert projected.accuracy == pytest.approx(network.accuracy, abs=0.01)
    assert projected.auroc_calibrated > network.auroc
    assert projected.flagged > network.flagged
    assert projected.train_std is not None
    assert loss_projected.train_std is not None
    assert projected.train_std < 0.1
    assert projected.train_std < loss_projected.train_std
    assert loss_projected.accuracy == network.accuracy
    assert projected.kernel_dimension is not None
    assert loss_projected.kernel_dimension is not None
    assert 0 < projected.kernel_dimension < loss_projected.kernel_dimension


def test_no_line_is_below_chance_and_known_digits_are_seldom_flagged(lines: list[demo.Line]) -> None:
    for line in lines:
        assert min(line.auroc, line.auroc_calibrated) > 0.6
        assert line.false_alarms < 0.12  # 5 %, and the error of two samples of 240 images
        assert line.flagged > 3 * line.false_alarms
        assert [len(p) for p in line.p_values] == [len(scores) for scores in line.scores]


def test_the_decision_counts_what_is_flagged(lines: list[demo.Line]) -> None:
    known, unseen = (int((p <= 0.05).sum()) for p in lines[1].p_values)
    assert f"{unseen} of 354 unseen digits are flagged, and {known} of 241 known ones" in command._decision(lines, 0.05)


def test_table_fits_a_terminal_and_holds_every_line(lines: list[demo.Line]) -> None:
    table = command._table(lines)
    assert all(line.name in table for line in lines)
    assert max(len(row) for row in table.splitlines()) <= 80


def test_picture_shows_uncertainty_between_the_data(lines: list[demo.Line], digits: Digits, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        toy = demo.toy_regression()
    inside = toy.std[(toy.grid.abs() > 0.5) & (toy.grid.abs() < 0.9)]
    assert toy.std[toy.grid.abs() < 0.1].min() > 2 * inside.max()
    demo.draw(toy, lines, digits, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_digits_are_those_of_scikit_learn_which_is_imported_only_if_its_file_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    calls, load = [], datasets.load_digits
    monkeypatch.setattr(datasets, "load_digits", lambda: calls.append("load") or load())
    read = demo.load_digits()
    assert not calls
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    for one, other in zip(vars(read).values(), vars(demo.load_digits()).values(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert calls == ["load"]


@pytest.mark.parametrize("extra", ["sklearn", "matplotlib"])
def test_command_line_without_its_extras_says_what_to_install(
    extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == f"nullbayes: This command needs {extra}: pip install 'nullbayes[demo]'\n"


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nullbayes\[demo\]'"):
        demo.load_digits()


def test_a_picture_path_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path / "nowhere" / "demo.png")]) == 2
    assert f"There is no folder {tmp_path / 'nowhere'} for the picture" in capsys.readouterr().err


def test_the_command_prints_the_table_and_draws_the_picture(
    digits: Digits, lines: list[demo.Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(demo, "load_digits", lambda: digits)
    monkeypatch.setattr(demo, "train_on_digits", lambda _: None)
    monkeypatch.setattr(demo, "compare", lambda *_: lines)  # which took its time above
    words = ["demo", "-o", str(tmp_path / "demo.png")]
    assert main(words) == 0
    assert command._table(lines) in capsys.readouterr().out
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["methods"]
    assert [(line["name"], line["auroc"]) for line in found] == [(line.name, line.auroc) for line in lines]
