"""An evaluation as text, Markdown, JSON and pandas has its figures, and marks the best."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.evaluation import Detection, Evaluation, EvaluationRow
from support.drawing import randn
from support.evaluated import FAR, NEAR, STRANGERS, M, X, Y, fitted
from support.models import REGRESSION

NOISES = {"one": (0.87,), "two": (0.052,), "three": (0.0521,)}


def made(name: str, nll: float | None, auroc: float, **more: Any) -> EvaluationRow:
    given = {"scores_in": torch.zeros(1), "scores_out": {"night": torch.ones(1)}, **more}
    return EvaluationRow(name, "MAP", "energy", {"night": Detection(auroc, 0.5, 0.25)}, nll, **given)


def table(*rows: EvaluationRow) -> Evaluation:
    return Evaluation("classification", 10, {"night": 20}, rows)


def test_text_marks_the_best_and_shows_what_is_missing_as_a_dash() -> None:
    text = str(table(made("one", 0.5, 0.9), made("another", 0.25, 0.75), made("score", None, 0.90001)))
    lines = text.splitlines()
    assert lines[0].split() == ["familiar", "(10)", "night", "(20)"]
    assert lines[1].split() == ["method", "NLL", "↓", "AUROC", "↑", "AUPR", "↑", "FPR95", "↓"]
    assert lines[2].split() == ["one", "0.5000", "0.900*", "0.500*", "0.250*"]
    assert lines[3].split() == ["another", "0.2500*", "0.750", "0.500*", "0.250*"]
    assert lines[4].split() == ["score", "-", "0.900*", "0.500*", "0.250*"]
    assert lines[2].index("0.5000") == lines[3].index("0.2500")
    assert lines[2].index("0.900") == lines[3].index("0.750") == lines[4].index("0.900")


def test_a_single_row_has_no_best() -> None:
    assert "*" not in str(table(made("one", 0.5, 0.9)))  # nor does the legend explain what is not there


def test_the_legend_says_what_a_star_is() -> None:
    text = str(table(made("one", 0.5, 0.9), made("another", 0.25, 0.75)))
    assert "\n* best method of its column, ties share it; ↑ higher, ↓ lower is better\n" in text


def test_the_legend_explains_what_is_shown_with_and_without_intervals(projected: Any, network: Any) -> None:
    for bootstrap in (0, 10):  # intervals widen the columns
        lines = str(nb.evaluate([projected, network], (X, Y), STRANGERS, bootstrap=bootstrap)).splitlines()
        for label in ("ECE", "AURC", "AUROC", "AUPR", "FPR95", "MiB"):
            assert sum(line.startswith(f"{label}: ") for line in lines) == 1


def test_the_legend_says_which_methods_have_the_default_prior_precision(network: Any) -> None:
    laplace = fitted(nb.baselines.DiagonalLaplace)
    methods = {"laplace": laplace, "network": network, "projected": fitted(nb.ProjectedPosterior, prior_precision=1.0)}
    line = "at the default prior precision of 1: laplace; optimize_prior_precision(held_out) chooses one"
    assert line in str(nb.evaluate(methods, (X, Y), STRANGERS)).splitlines()
    assert line in str(nb.evaluate(methods, (X, Y), STRANGERS, scores="all")).splitlines()
    laplace.prior_precision = 50.0
    assert "default" not in str(nb.evaluate(methods, (X, Y), STRANGERS))
    assert "default" not in str(table(made("a score alone", None, 0.5, default_precision=True)))


def test_the_legend_says_where_methods_predict_with_different_noise() -> None:
    told = "noise of the targets, which NLL and intervals depend on: "
    one, two, three = (made(name, 1.0, 0.5, noise=noise) for name, noise in NOISES.items())
    assert told + "0.87 (one); 0.052 (two, three)" in str(table(one, two, three)).splitlines()
    assert "likelihood=nb.likelihoods.Regression(sigma_noise=...) gives" in str(table(one, two))
    scores = made("a score alone", None, 0.5, noise=(3.0,))
    for rows in ((two, three, scores), (one,), (made("one", 1.0, 0.5), made("two", 1.0, 0.5))):
        assert "noise" not in str(table(*rows))
    outputs = made("four", 1.0, 0.5, noise=(1.0, 2.0)), made("five", 1.0, 0.5, noise=(1.0, 3.0))
    assert told + "1, 2 (four); 1, 3 (five)" in str(table(*outputs)).splitlines()


def test_a_row_has_the_noise_that_its_predictions_have() -> None:
    y = randn(M, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    task = dataclasses.replace(REGRESSION, likelihood="regression")  # the noise is estimated
    projected, laplace = fitted(nb.ProjectedPosterior, task), fitted(nb.baselines.DiagonalLaplace, task)
    projected.temperature = 4.0
    methods = {"projected": projected, "laplace": laplace}
    found = nb.evaluate(methods, (FAR, y))
    for name, posterior in methods.items():
        assert found[name].noise == pytest.approx(posterior.predict(FAR).noise.sqrt().flatten().tolist())
    assert "noise of the targets" in str(found)


def test_coverage_is_best_where_it_is_close_to_its_level() -> None:
    rows = [made(str(c), 1.0, 0.5, rmse=1.0, coverage=c) for c in (0.99, 0.88, 0.5)]
    assert "0.880*" in str(table(*rows))
    assert "0.990*" not in str(table(*rows))


def test_text_fits_a_line_with_many_strangers_and_long_names(projected: Any, network: Any) -> None:
    strangers = {f"stranger number {i} with a name that is long": NEAR for i in range(5)}
    methods = {"a name of a method that is much longer than a column of names": projected, "network": network}
    for bootstrap in (0, 10):
        text = str(nb.evaluate(methods, (X, Y), strangers, bootstrap=bootstrap, scores="energy"))
        assert max(map(len, text.splitlines())) <= 120
        assert text.count("AUROC ↑") == 5
        assert text.count("NLL") == 1
        assert ("[" in text) == (bootstrap > 0)


@pytest.mark.parametrize("strangers", [None, {}])
def test_predictions_are_compared_without_strangers(projected: Any, ensemble: Any, strangers: Any) -> None:
    found = nb.evaluate({"projected": projected, "a score": ensemble}, (X, Y), strangers)
    lines = str(found).splitlines()
    assert lines[0].split() == ["familiar", "(60)", "cost"]
    assert "accuracy" in lines[1]
    assert not {"AUROC", "AUPR", "flagged"} & set(lines[1].split())
    assert lines[3].split()[:4] == ["a", "score", "-", "-"]
    assert {group for group, _ in found.to_pandas()} == {"familiar", "cost"}
    assert "AUROC" not in nb.evaluate([projected], (X, Y), strangers, bootstrap=5).to_markdown()
    assert len(found.plot().axes) == 1
    with pytest.raises(nb.errors.SettingsError, match="nothing to draw: no method predicts"):
        nb.evaluate({"a score": ensemble}, (X, Y)).plot()


def test_markdown_is_one_table(evaluation: Evaluation) -> None:
    lines = [line.strip("|").split("|") for line in evaluation.to_markdown().splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert all(set(cell.strip()) <= {"-", ":"} for cell in lines[1])
    assert [line[0].strip() for line in lines[2:]] == ["projected", "network", "ensemble"]
    column = [head.strip() for head in lines[0]].index("far (40): AUROC ↑")
    values = [float(line[column].strip().strip("*")) for line in lines[2:]]
    assert values == [pytest.approx(row.strangers["far"].auroc, abs=6e-4) for row in evaluation.rows]
    best = max(evaluation.rows, key=lambda row: row.strangers["far"].auroc)
    assert [line[0].strip() for line in lines[2:] if "**" in line[column]] == [best.name]
    assert "a\\|b" in table(made("a|b", 0.5, 0.5)).to_markdown()


def test_a_dictionary_is_json(projected: Any) -> None:
    found = nb.evaluate({"projected": projected}, (X, Y), STRANGERS, bootstrap=5)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    row = plain["rows"][0]
    assert row["strangers"]["far"]["auroc"] == found["projected"].strangers["far"].auroc
    assert row["intervals"]["nll"] == list(found["projected"].intervals["nll"])
    assert "scores_in" not in row
    assert plain["n_strangers"] == {"far": M, "near": M - 10}


def test_pandas_has_the_figures(evaluation: Evaluation, projected: Any) -> None:
    frame = evaluation.to_pandas()
    assert list(frame.index) == ["projected", "network", "ensemble"]
    assert frame.loc["network", ("far", "AUROC")] == evaluation["network"].strangers["far"].auroc
    assert frame.loc["network", ("familiar", "NLL")] == evaluation["network"].nll
    assert frame["familiar", "NLL"].isna().tolist() == [False, False, True]
    with_intervals = nb.evaluate([projected], (X, Y), STRANGERS, bootstrap=5)
    low = with_intervals.to_pandas()["near", "FPR95 low"].item()
    assert low == with_intervals.rows[0].strangers["near"].intervals["fpr95"][0]


def test_an_unknown_row_is_refused_with_those_there_are(evaluation: Evaluation) -> None:
    with pytest.raises(KeyError, match="'projected', 'network', 'ensemble'"):
        evaluation["other"]
