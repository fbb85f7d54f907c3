"""`nb.evaluate` judges calibrated methods by their calibrated score and their decisions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.errors import NullBayesWarning, SettingsError
from nullbayes.predictive import SCORES
from support.evaluated import STRANGERS, X, Y, check_detection, fitted
from support.models import CLASSIFICATION


@pytest.fixture(scope="module")
def calibrated() -> dict[str, Any]:
    data = CLASSIFICATION.data(n=120, seed=21)
    return {kind.__name__: fitted(kind).calibrate(*data) for kind in (nb.ProjectedPosterior, nb.detectors.KNN)}


def test_a_calibrated_method_is_judged_by_its_calibrated_score_and_its_decisions(calibrated: dict[str, Any]) -> None:
    found = nb.evaluate(calibrated, (X, Y), STRANGERS)
    for name, method in calibrated.items():
        row = found[name]
        assert row.score == "calibrated"
        check_detection(row, method, None, X, STRANGERS)
        assert row.false_alarms == pytest.approx(float(method.is_ood(X).double().mean()))
        for stranger, x in STRANGERS.items():
            assert row.strangers[stranger].flagged == pytest.approx(float(method.is_ood(x).double().mean()))
    assert "false alarms" in str(found)
    assert "flagged" in found.to_markdown()


def test_all_scores_of_a_calibrated_method_have_rows_and_one_decides(calibrated: dict[str, Any]) -> None:
    found = nb.evaluate({"p": calibrated["ProjectedPosterior"]}, (X, Y), STRANGERS, scores="all")
    assert [row.score for row in found.rows] == ["calibrated", *SCORES, "relative_variance"]
    assert [row.false_alarms is None for row in found.rows] == [False, *(True for _ in (*SCORES, "one more"))]


@pytest.mark.parametrize("name", ["ProjectedPosterior", "KNN"])
def test_data_that_have_calibrated_cause_a_warning(calibrated: dict[str, Any], name: str) -> None:
    """Their false alarms are alpha, whatever the method does."""
    method, (x, y) = {"p": calibrated[name]}, CLASSIFICATION.data(n=120, seed=21)
    for used in (slice(None), slice(60), slice(30, 120)):
        with pytest.warns(NullBayesWarning, match="have calibrated 'p', so that its false alarms are alpha"):
            nb.evaluate(method, (x[used], y[used]), STRANGERS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*have calibrated")
        nb.evaluate(method, CLASSIFICATION.data(n=400, seed=22), STRANGERS)


def test_the_combined_score_may_be_named_where_it_was_learned(calibrated: dict[str, Any]) -> None:
    posterior, detector = calibrated["ProjectedPosterior"], calibrated["KNN"]
    row = nb.evaluate({"p": (posterior, "combined")}, (X, Y), STRANGERS)["p"]
    assert torch.equal(row.scores_in, posterior.ood_score(X, "combined").cpu())
    assert row.false_alarms is not None
    for method in (detector, fitted(nb.ProjectedPosterior)):
        with pytest.raises(SettingsError, match=r'not calibrated for "combined": call calibrate\(held_out, kind="comb'):
            nb.evaluate({"m": method}, (X, Y), STRANGERS, scores="combined")


def test_the_legend_says_by_which_score_each_method_is_judged(calibrated: dict[str, Any], network: Any) -> None:
    posterior = calibrated["ProjectedPosterior"]
    text = str(nb.evaluate({"ours": posterior, "network": network}, (X, Y), STRANGERS))
    kind = nb.evaluate({"network": network}, (X, Y), STRANGERS)["network"].score.replace("_", " ")
    assert f"judged by: combined, calibrated (ours); {kind} (network)" in text
    assert "judged by" not in str(nb.evaluate({"network": network}, (X, Y), STRANGERS))
    assert "judged by" not in str(nb.evaluate({"ours": posterior, "network": network}, (X, Y), STRANGERS, scores="all"))


def test_the_legend_says_which_methods_are_not_calibrated(calibrated: dict[str, Any], network: Any) -> None:
    together = str(nb.evaluate({**calibrated, "network": network}, (X, Y), STRANGERS))
    assert "not calibrated: network; call calibrate(held_out) on all methods, or on none" in together
    assert "not calibrated" not in str(nb.evaluate(calibrated, (X, Y), STRANGERS))
    assert "not calibrated" not in str(nb.evaluate({"network": network}, (X, Y), STRANGERS))
