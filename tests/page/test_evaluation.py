"""Sections of a page show the figures of an evaluation, over one seed or several."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

import nullbayes as nb
from nullbayes.page import evaluation_sections, evaluation_summary, gallery
from nullbayes.page.document import Histograms, Reliability, Table

pytestmark = pytest.mark.cpu


def evaluated(seed: int, **options: Any) -> nb.Evaluation:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(120, 4, generator=generator)
    y = (x + 0.5 * torch.randn(120, 4, generator=generator))[:, :3].argmax(1)
    model = nb.as_module(lambda p, x: x @ p["w"], {"w": 2.0 * torch.eye(4)[:, :3]})
    network = nb.baselines.MAP(model).fit(x[:40], y[:40])
    knn = nb.detectors.KNN(model).fit(x[:40], y[:40])
    strangers = {"far": 5 * torch.randn(30, 4, generator=generator), "near": torch.randn(20, 4, generator=generator)}
    return nb.evaluate({"network": network, "KNN": knn}, (x[40:], y[40:]), strangers, **options)


@pytest.fixture(scope="module")
def evaluation() -> nb.Evaluation:
    return evaluated(0)


def cell(table: Table, row: str, column: str) -> Any:
    i = [found.name for found in table.columns].index(column)
    return next(cells[i] for cells in table.rows if cells[0] == row)


def test_tables_hold_every_figure(evaluation: nb.Evaluation) -> None:
    predictions, detection, *_ = evaluation_sections(evaluation)
    (familiar,), (far, near, cost) = predictions.blocks, detection.blocks
    for row in evaluation.rows:
        assert cell(familiar, row.name, "accuracy").mean == row.accuracy
        assert cell(familiar, row.name, "NLL").mean == row.nll
        assert cell(familiar, row.name, "ECE").mean == row.ece
        assert cell(familiar, row.name, "AURC").mean == row.aurc
        for table, name in ((far, "far"), (near, "near")):
            found = row.strangers[name]
            figures = {"AUROC": found.auroc, "AUPR": found.aupr, "FPR95": found.fpr95}
            assert {key: cell(table, row.name, key).mean for key in figures} == figures
        assert cell(cost, row.name, "s per 1,000").mean == row.seconds_per_1000
    assert {column.name for column in familiar.columns}.isdisjoint({"RMSE", "false alarms"})  # nobody has them
    assert all(len(cells) == len(familiar.columns) for cells in familiar.rows)
    best = {column.name: column.best for table in (familiar, far) for column in table.columns}
    assert (best["accuracy"], best["NLL"], best["AUROC"], best["FPR95"]) == ("high", "low", "high", "low")


def test_seeds_are_averaged_and_the_paper_stands_beside(evaluation: nb.Evaluation) -> None:
    runs = [evaluation, *(evaluated(seed) for seed in (1, 2))]
    stored = [json.loads(json.dumps(evaluation_summary(run), allow_nan=False)) for run in runs]
    _, detection, *_ = evaluation_sections(stored, paper={"KNN": {"far: AUROC": 0.5}})
    found = cell(detection.blocks[0], "KNN", "AUROC")
    values = [run["KNN"].strangers["far"].auroc for run in runs]
    assert found.mean == pytest.approx(sum(values) / 3)
    assert found.spread == pytest.approx(statistics.stdev(values))
    assert found.paper == 0.5
    assert cell(detection.blocks[0], "network", "AUROC").paper is None
    assert "3 seeds" in detection.paragraphs[0]
    with pytest.raises(ValueError, match="at least one"):
        evaluation_sections([])


def test_intervals_have_columns_of_their_own() -> None:
    evaluation = evaluated(0, bootstrap=20, generator=torch.Generator().manual_seed(0))
    _, detection, *_ = evaluation_sections(evaluation)
    low, high = evaluation["KNN"].strangers["far"].intervals["auroc"]
    far = detection.blocks[0]
    assert (cell(far, "KNN", "AUROC low").mean, cell(far, "KNN", "AUROC high").mean) == (low, high)


def test_reliability_and_histograms_are_those_of_the_rows_shown(evaluation: nb.Evaluation) -> None:
    sections = evaluation_sections(evaluation_summary(evaluation, shown=["network", "KNN"]))
    named = {section.title: section for section in sections}
    (reliability,) = named["Calibration"].blocks  # both rows are of one network
    assert isinstance(reliability, Reliability)
    table = evaluation["network"].reliability
    for i, n in enumerate(table[0].tolist()):
        assert reliability.count[i] == n
        if n:
            assert reliability.accuracy[i] == pytest.approx(float(table[1, i]) / n)
            assert reliability.confidence[i] == pytest.approx(float(table[2, i]) / n)
        else:
            assert math.isnan(reliability.accuracy[i])
    for row, histograms in zip(evaluation.rows, named["Scores"].blocks, strict=True):
        assert isinstance(histograms, Histograms)
        assert list(histograms.shares) == ["familiar", "far", "near"]
        edges = np.array(histograms.edges)
        for name, scores in {"familiar": row.scores_in, **row.scores_out}.items():
            values = np.log10(scores.numpy()) if "log" in histograms.x_label else scores.numpy()
            counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
            np.testing.assert_allclose(histograms.shares[name], counts / len(scores))
        assert f"far {row.strangers['far'].auroc:.3f}" in histograms.alt


def test_scores_of_many_sizes_are_shown_by_their_logarithm(evaluation: nb.Evaluation) -> None:
    row = evaluation["KNN"]
    wide = dataclasses.replace(row, scores_in=row.scores_in.exp(), scores_out={"far": row.scores_in.exp() * 1e4})
    other = dataclasses.replace(evaluation, rows=(wide,), n_strangers={"far": 30})
    found = evaluation_summary(other)["histograms"]["KNN"]
    assert found["label"].startswith("log₁₀ of ")
    assert found["edges"][-1] - found["edges"][0] < 10
    assert sum(found["shares"]["far"]) == pytest.approx(1.0)


def test_a_threshold_follows_the_scale_of_the_scores(evaluation: nb.Evaluation) -> None:
    summary = evaluation_summary(evaluation, shown=["network", "KNN"], thresholds={"KNN": 2.0})
    assert "threshold" not in summary["histograms"]["network"]
    row = evaluation["KNN"]
    wide = dataclasses.replace(row, scores_in=row.scores_in.exp(), scores_out={"far": row.scores_in.exp() * 1e4})
    other = dataclasses.replace(evaluation, rows=(wide,), n_strangers={"far": 30})
    found = evaluation_summary(other, thresholds={"KNN": 100.0})["histograms"]["KNN"]
    assert found["threshold"] == pytest.approx(2.0)
    (scores,) = (s for s in evaluation_sections(summary) if s.title == "Scores")
    assert [block.threshold for block in scores.blocks] == [None, 2.0]


def test_what_does_not_depend_on_the_score_is_shown_once_per_method(evaluation: nb.Evaluation) -> None:
    several = evaluated(0, scores="all")
    predictions, detection, *_ = evaluation_sections(several, per_method=True, skipped=["nll"])
    (familiar, by_score), (far, _, cost) = predictions.blocks, detection.blocks
    assert [row[0] for row in familiar.rows] == [row[0] for row in cost.rows] == ["network", "KNN"]
    assert [row[0] for row in by_score.rows] == [row[0] for row in far.rows] == [row.name for row in several.rows]
    assert [column.name for column in familiar.columns] == ["method", "accuracy", "ECE"]
    assert [column.name for column in by_score.columns] == ["method", "AURC"]
    assert cell(familiar, "network", "accuracy").mean == evaluation["network"].accuracy


def test_a_section_without_anything_to_show_is_left_out(evaluation: nb.Evaluation) -> None:
    titles = [section.title for section in evaluation_sections(evaluation)]
    assert titles == ["Predictions", "Detection", "Calibration", "Scores"]
    pictures = gallery("Some", [torch.zeros(5, 5)], ["p = 0.1"])
    assert evaluation_sections(evaluation, galleries=[pictures])[-1].blocks == [pictures]


def test_images_become_bytes_on_one_scale() -> None:
    grey, color = torch.zeros(1, 6, 8), torch.ones(3, 6, 8)
    grey[0, 2, 3], color[1] = -1.0, 3.0
    one, other = gallery("Two", [grey, color], ["a", "b"]).pictures
    assert np.array(one.image).shape == (6, 8)
    assert np.array(other.image).shape == (6, 8, 3)
    assert one.image[2][3] == 0  # the darkest of both
    assert one.image[0][0] == 64  # 0 between -1 and 3
    assert other.image[0][0] == [128, 255, 128]
    plain = gallery("One", [torch.full((5, 5), 0.5)], ["a"]).pictures[0]
    assert plain.image[0][0] == 128  # between 0 and 1 the scale is that of brightness
    assert np.array(gallery("Big", [torch.randn(300, 200)], ["a"]).pictures[0].image).shape == (75, 50)


def test_other_inputs_are_described() -> None:
    inputs: list[Any] = [torch.tensor([1.0, 2.5, 3.0, 4.0, 5.0]), "a query", None, torch.zeros(2, 9, 9)]
    texts = [picture.text for picture in gallery("Rows", inputs, ["p"] * 4).pictures]
    assert texts == ["(1, 2.5, 3, 4, …)", "a query", "", "(0, 0, 0, 0, …)"]
    assert not any(picture.image for picture in gallery("Rows", inputs, ["p"] * 4).pictures)
