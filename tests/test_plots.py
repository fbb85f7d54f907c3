"""Figures and tables of predictions and reports hold the numbers that they are made of."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nullbayes as nb
from nullbayes.errors import SettingsError

pytestmark = pytest.mark.cpu


def test_figure_of_classes_has_probabilities_and_quantiles_of_samples(tmp_path: Path) -> None:
    samples = torch.randn(50, 3, 2, generator=torch.Generator().manual_seed(0))
    probs = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
    prediction = nb.Prediction(samples.mean(0), samples.var(0), probs, samples, likelihood="classification")
    figure = prediction.plot(tmp_path / "classes.png", n_inputs=2)
    assert (tmp_path / "classes.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in figure.axes] == ["input 0", "input 1"]
    for i, axis in enumerate(figure.axes):
        assert [bar.get_height() for bar in axis.patches] == pytest.approx(probs[i].tolist())
        shares = np.exp(samples[:, i].numpy()) / np.exp(samples[:, i].numpy()).sum(1, keepdims=True)
        drawn = np.array([segment[:, 1] for segment in axis.collections[0].get_segments()])
        assert np.allclose(drawn, np.quantile(shares, [0.05, 0.95], axis=0).T, atol=1e-6)


def test_figure_of_numbers_has_sorted_means_and_a_band_of_two_standard_deviations() -> None:
    mean, variance = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([[0.25], [1.0], [4.0]])
    figure = nb.Prediction(mean, variance, None, mean[None], torch.tensor(1.0)).plot()
    (axis,) = figure.axes
    assert axis.lines[0].get_ydata().tolist() == [1.0, 2.0, 3.0]
    edges = axis.collections[0].get_paths()[0].vertices
    assert {(x, y) for x, y in edges.tolist()} >= {(0, -1), (0, 3), (1, -2), (1, 6), (2, 2), (2, 4)}


def test_predictions_at_positions_are_not_drawn() -> None:
    mean = torch.zeros(2, 3, 4)
    with pytest.raises(SettingsError, match=r"Predictions of shape \(N, outputs\) can be drawn, not \(2, 3, 4\)"):
        nb.Prediction(mean, mean, None, mean[None]).plot()


def test_figure_and_table_of_a_report_have_its_times_and_residuals(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0)
    report = posterior.fit(torch.eye(4)[:2], torch.ones(2, 1), 5, progress=False).report
    figure = report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    times, residuals = figure.axes
    assert [bar.get_width() for bar in times.patches] == list(report.seconds.values())
    assert [label.get_text() for label in times.get_yticklabels()] == list(report.seconds)
    assert residuals.lines[0].get_ydata().tolist() == list(report.residual)
    assert residuals.lines[1].get_ydata() == [report.tolerance, report.tolerance]
    table = report.to_pandas()
    assert table["residual"].tolist() == list(report.residual)
    assert table["sweeps"].tolist() == list(report.sweeps_per_sample)
    assert table.index.name == "sample"


@pytest.mark.parametrize(("package", "method"), [("pandas", "to_pandas"), ("matplotlib", "plot")])
def test_a_package_that_is_missing_is_named_with_what_to_type(
    package: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    samples, probs = torch.zeros(4, 3, 2), torch.full((3, 2), 0.5)
    prediction = nb.Prediction(samples.mean(0), samples.var(0), probs, samples, likelihood="classification")
    with pytest.raises(ModuleNotFoundError, match=rf"{method}\(\) needs {package}.*: pip install {package}"):
        getattr(prediction, method)()
