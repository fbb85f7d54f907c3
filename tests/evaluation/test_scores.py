"""Every row of `nb.evaluate` is judged by a score: that of the method, one by name, or all of them."""

from __future__ import annotations

from typing import Any

import torch

import nullbayes as nb
from nullbayes.predictive import SCORES
from support.evaluated import STRANGERS, N, X, Y, check_detection, fitted
from support.models import REGRESSION


def test_every_score_of_a_method_has_a_row(projected: Any, ensemble: Any) -> None:
    found = nb.evaluate({"p": projected, "e": ensemble}, (X, Y), STRANGERS, scores="all")
    assert [row.name for row in found.rows] == [
        *(f"p: {kind}" for kind in (*SCORES, "relative_variance")),
        "e: local_ensemble",
    ]
    for row in found.rows:
        check_detection(row, projected if row.name.startswith("p") else ensemble, row.score, X, STRANGERS)


def test_a_method_with_a_score_of_its_own_has_that_and_the_others() -> None:
    scod = fitted(nb.baselines.SCOD)
    found = nb.evaluate({"scod": scod}, (X, Y), STRANGERS, scores="all")
    assert [row.score for row in found.rows] == ["scod", *SCORES]
    for row in found.rows:
        check_detection(row, scod, row.score, X, STRANGERS)
    assert nb.evaluate([scod], (X, Y), STRANGERS)["SCOD"].score == "scod"


def test_scores_that_need_probabilities_are_left_out_of_a_regression() -> None:
    posterior = fitted(nb.ProjectedPosterior, REGRESSION)
    y = torch.zeros(N, REGRESSION.outputs, dtype=torch.float64)
    found = nb.evaluate([posterior], (X, y), STRANGERS, scores="all")
    assert [row.score for row in found.rows] == ["max_variance", "sum_variance", "relative_variance"]


def test_one_score_is_for_all_methods_but_those_with_their_own(projected: Any, network: Any) -> None:
    methods = {"a": projected, "b": (network, "max_logit")}
    found = nb.evaluate(methods, (X, Y), STRANGERS, scores="entropy")
    assert [(row.name, row.score) for row in found.rows] == [("a", "entropy"), ("b", "max_logit")]
    check_detection(found["a"], projected, "entropy", X, STRANGERS)


def test_methods_without_names_are_named_after_their_classes(projected: Any, network: Any) -> None:
    found = nb.evaluate([projected, (network, "energy")], (X, Y), STRANGERS)
    assert [(row.name, row.method, row.score) for row in found.rows] == [
        ("ProjectedPosterior", "ProjectedPosterior", "entropy"),
        ("MAP", "MAP", "energy"),
    ]
    assert nb.evaluate(projected, (X, Y), STRANGERS).rows[0].name == "ProjectedPosterior"
