"""The demonstration, small: what it measures, prints and draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nullbayes import cli, demo
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
    assert f"{unseen} of 354 unseen digits are flagged, and {known} of 241 known ones" in cli._decision(lines, 0.05)


def test_table_fits_a_terminal_and_holds_every_line(lines: list[demo.Line]) -> None:
    table = cli._table(lines)
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


def test_command_line_prints_help() -> None:
    answer = subprocess.run([sys.executable, "-m", "nullbayes", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in answer.stdout


@pytest.mark.parametrize("extra", ["sklearn", "matplotlib"])
def test_command_line_without_its_extras_says_what_to_install(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(SystemExit, match=rf"needs {extra}: pip install 'nullbayes\[demo\]'"):
        cli.main(["demo"])


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nullbayes\[demo\]'"):
        demo.load_digits()


def test_a_picture_path_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"There is no folder .*nowhere for the picture"):
        cli.run_demo(tmp_path / "nowhere" / "demo.png")
