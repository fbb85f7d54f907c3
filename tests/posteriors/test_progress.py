"""The line that a fit shows on a terminal."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

import nullbayes as nb
from models import CLASSIFICATION, MLP
from nullbayes.posteriors.progress import Meter, Progress, duration, sweeps_left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def residual(value: float) -> torch.Tensor:
    return torch.tensor([value / 3, value])


def test_line_tells_sweep_residual_and_time_left() -> None:
    times = iter([100.0, 102.0])
    with Progress(show=True, file=Terminal(), clock=lambda: next(times)) as bar:
        show = bar.sweeps(1e-4)
        show(1, residual(1e-1))
        assert bar.text == "projecting: sweep 1, residual 1.0e-01, tolerance 1e-04"
        show(2, residual(1e-2))  # a decade a sweep, a second a sweep, two decades to go
        assert bar.text == "projecting: sweep 2, residual 1.0e-02, tolerance 1e-04, about 2 s left"
        show(4, residual(1e-2))  # the later half gained nothing
        assert bar.text == "projecting: sweep 4, residual 1.0e-02, tolerance 1e-04"


@pytest.mark.parametrize(
    ("seen", "left"),
    [
        ([], None),
        ([(1, 0.1)], None),
        ([(1, 0.1), (2, 0.1)], None),
        ([(1, 0.1), (2, 0.2)], None),
        ([(1, 0.1), (2, 0.0)], None),
        ([(1, 0.1), (2, 1e-5)], 0.0),
        ([(2, 1e-1), (4, 1e-2)], 4.0),
        ([(1, 1e-1), (5, 1e-2), (6, 1e-2), (11, 1e-3)], 6.0),  # since sweep 5, the last before the middle
    ],
)
def test_sweeps_left_follow_the_slope_of_the_later_half(seen: list[tuple[int, float]], left: float | None) -> None:
    assert sweeps_left(seen, 1e-4) == (left if left is None else pytest.approx(left))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5400.0, "90 min"), (36000.0, "10 h"), (864000.0, "10 days")],
)
def test_durations_are_said_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_phases_are_announced_as_they_begin() -> None:
    seen = []
    with Progress(show=False) as bar:
        meter = Meter(torch.device("cpu"), lambda name: (bar.phase(name), seen.append(bar.text)))
        for name in ("data", "rows", "factors", "projection", "measure", "something else"):
            with meter.phase(name):
                assert len(seen) == len(meter.seconds) + 1
    assert seen == ["reading the data", "forming rows", "factoring", "projecting", "measuring", "something else"]


def test_nothing_is_written_where_no_one_looks() -> None:
    for show, file in ((True, io.StringIO()), (False, Terminal())):
        with Progress(show=show, file=file) as bar:
            bar.phase("rows")
        assert file.getvalue() == ""


def test_line_is_written_and_wiped() -> None:
    with Progress(show=True, file=(file := Terminal())) as bar:
        bar.phase("rows")
        assert "forming rows" in file.getvalue()
    assert file.getvalue().endswith("\r")


def test_fit_shows_every_phase_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", file := Terminal())
    posterior = nb.ProjectedPosterior(MLP.build()).fit(
        [CLASSIFICATION.data()], 4, projector=nb.projectors.Krylov(nb.projectors.Alternating(block_rows=3))
    )
    for text in ("reading the data", "forming rows", "factoring", "projecting: sweep 2, residual", "measuring"):
        assert text in file.getvalue()
    shown = len(file.getvalue())
    posterior.extend(2)
    assert "measuring" in file.getvalue()[shown:]
    assert pickle.loads(pickle.dumps(posterior)).report == posterior.report
