"""The figure of an evaluation shows detection for each set of strangers, and reliability."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.evaluation import Evaluation
from support.evaluated import FAR, STRANGERS, N, X, Y, fitted
from support.models import REGRESSION


def test_figure_has_two_panels_for_each_set_and_one_of_reliability(evaluation: Evaluation, tmp_path: Any) -> None:
    figure = evaluation.plot(tmp_path / "evaluation.png")
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == 5
    roc = figure.axes[0]
    assert [text.get_text().partition(" (")[0] for text in roc.get_legend().get_texts()] == [
        row.name for row in sorted(evaluation.rows, key=lambda row: -row.strangers["far"].auroc)
    ]
    for line, row in zip(roc.lines[1:], sorted(evaluation.rows, key=lambda r: -r.strangers["far"].auroc), strict=True):
        x, y = (torch.tensor(values) for values in line.get_data())
        assert float(torch.trapezoid(y, x)) == pytest.approx(row.strangers["far"].auroc, abs=1e-9)
    reliability = figure.axes[-1]
    assert len(reliability.lines) == 3  # the diagonal, and two methods that predict


def test_figure_of_scores_alone_has_no_reliability(ensemble: Any) -> None:
    assert len(nb.evaluate([ensemble], (X, Y), STRANGERS).plot().axes) == 4


def test_figure_shows_predictions_once_for_all_scores_of_a_method(projected: Any, network: Any) -> None:
    found = nb.evaluate({"a": projected, "b": network}, (X, Y), {"far": FAR}, scores="all").plot()
    assert [text.get_text() for text in found.axes[-1].get_legend().get_texts()] == ["a", "b"]
    assert len(found.axes[0].lines) == 1 + 8  # the best eight of fourteen


def test_methods_with_equal_predictions_share_a_curve_that_has_their_names(projected: Any, network: Any) -> None:
    methods = {"first": network, "posterior": projected, "second": network, "third": network, "fourth": network}
    legend = nb.evaluate(methods, (X, Y), {"far": FAR}).plot().axes[-1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["first, second, third, ...", "posterior"]


def test_figure_of_a_regression_shows_coverage() -> None:
    posterior = fitted(nb.ProjectedPosterior, REGRESSION)
    y = torch.zeros(N, REGRESSION.outputs, dtype=torch.float64)
    assert "Intervals" in nb.evaluate([posterior], (X, y), STRANGERS).plot().axes[-1].get_title()
