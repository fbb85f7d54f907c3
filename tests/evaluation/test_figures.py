"""The figures of `nb.evaluate` are those of `nb.metrics`, for every likelihood, and costs are those of the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.evaluation import Evaluation
from support.drawing import randint, randn
from support.evaluated import FAR, STRANGERS, M, N, X, Y, check_detection, fitted
from support.models import MLP, REGRESSION

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here


def test_figures_of_classes_are_those_of_the_metrics(evaluation: Evaluation, projected: Any, network: Any) -> None:
    for name, method, kind in (("projected", projected, None), ("network", network, "energy")):
        row, probs = evaluation[name], method.predict(X).probs
        check_detection(row, method, kind, X, STRANGERS)
        assert row.accuracy == pytest.approx(nb.metrics.accuracy(probs, Y), rel=1e-12)
        assert row.nll == pytest.approx(nb.metrics.nll(probs, Y), rel=1e-12)
        assert row.ece == pytest.approx(nb.metrics.ece(probs, Y), rel=1e-12)
        wrong = probs.argmax(1) != Y
        assert row.aurc == pytest.approx(nb.metrics.aurc(method.ood_score(X, kind), wrong), rel=1e-12)
        assert row.rmse is None
        assert row.coverage is None
    assert (evaluation.n_familiar, evaluation.n_strangers) == (N, {"far": M, "near": M - 10})


def test_figures_of_numbers_are_those_of_the_metrics() -> None:
    posterior = fitted(nb.ProjectedPosterior, REGRESSION)
    y = randn(N, REGRESSION.outputs, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    row = nb.evaluate([posterior], (X, y), STRANGERS).rows[0]
    prediction = posterior.predict(X)
    check_detection(row, posterior, None, X, STRANGERS)
    variance = prediction.variance + prediction.noise
    assert row.rmse == pytest.approx(nb.metrics.rmse(prediction.mean, y), rel=1e-12)
    assert row.nll == pytest.approx(nb.metrics.gaussian_nll(prediction.mean, variance, y), rel=1e-12)
    assert row.coverage == pytest.approx(nb.metrics.interval_coverage(*prediction.interval(0.9), y), rel=1e-12)
    losses = (prediction.mean - y).square().mean(1)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(X), losses), rel=1e-12)
    assert row.accuracy is None
    assert row.ece is None
    counts, met, promised = row.reliability
    for level, inside in zip(promised / counts, met / counts, strict=True):
        lower, upper = prediction.interval(float(level))
        assert float(inside) == pytest.approx(nb.metrics.interval_coverage(lower, upper, y), abs=1e-9)


@pytest.mark.parametrize(("likelihood", "outputs"), [("binary", 1), ("multilabel", 3)])
def test_figures_of_labels_are_those_of_the_metrics(likelihood: str, outputs: int) -> None:
    targets = randint(2, (N, outputs), generator=torch.Generator().manual_seed(5))
    posterior = nb.ProjectedPosterior(MLP.build(outputs), likelihood, prior_precision=1.0)
    posterior.fit(X[:9], targets[:9].double(), 5, progress=False)
    row, probs = nb.evaluate([posterior], (X, targets), STRANGERS).rows[0], posterior.predict(X).probs
    assert row.accuracy == pytest.approx(nb.metrics.accuracy(probs, targets, multilabel=True), rel=1e-12)
    assert row.nll == pytest.approx(nb.metrics.nll(probs, targets, multilabel=True), rel=1e-12)
    assert row.ece == pytest.approx(nb.metrics.ece(probs, targets, multilabel=True), rel=1e-12)
    wrong = ((probs >= 0.5) != targets.bool()).double().mean(1)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(X), wrong), rel=1e-12)


def test_a_certain_and_wrong_label_costs_what_the_metric_says() -> None:
    model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.full((1,), 40.0)})
    x, y = torch.tensor([[1.0], [-1.0], [1.0], [0.02]]), torch.tensor([1, 0, 0, 1])
    network = nb.baselines.MAP(model, "binary").fit(x, y)
    probs = network.predict(x).probs
    assert float(probs[2]) == 1.0  # in float32
    row = nb.evaluate([network], (x, y), {"zeros": torch.zeros(2, 1)}).rows[0]
    assert row.nll == pytest.approx(nb.metrics.nll(probs[:, 0], y), rel=1e-12)
    assert row.nll > 21.0


def test_a_loss_of_ones_own_is_the_selective_risk() -> None:
    def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().sum(1)

    y = randn(N, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    posterior = nb.ProjectedPosterior(MLP.build(2), absolute, prior_precision=1.0).fit(X[:9], y[:9], 5, progress=False)
    row = nb.evaluate([posterior], (X, y), STRANGERS).rows[0]
    losses = absolute(posterior.predict(X).mean, y)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(X), losses), rel=1e-12)
    assert row.nll is None
    assert row.reliability is None
    assert len(nb.evaluate([posterior], (X, y), STRANGERS).plot().axes) == 4


def test_a_method_without_predictions_has_scores_alone(evaluation: Evaluation, ensemble: Any) -> None:
    row = evaluation["ensemble"]
    check_detection(row, ensemble, None, X, STRANGERS)
    assert row.score == "local_ensemble"
    assert (row.nll, row.ece, row.accuracy, row.aurc, row.reliability) == (None,) * 5


def test_costs_are_those_of_the_report(evaluation: Evaluation, projected: Any) -> None:
    row = evaluation["projected"]
    assert row.fit_seconds == sum(projected.report.seconds.values())
    assert row.peak_memory == projected.report.peak_memory
    assert row.seconds_per_1000 > 0
    assert row.false_alarms is None
    assert row.strangers["far"].flagged is None


def test_scores_are_kept_on_the_cpu(evaluation: Evaluation, projected: Any) -> None:
    row = evaluation["projected"]
    assert torch.equal(row.scores_in, projected.ood_score(X).cpu())
    assert torch.equal(row.scores_out["far"], projected.ood_score(FAR).cpu())
    assert row.scores_in.device.type == "cpu"
