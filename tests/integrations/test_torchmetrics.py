"""Predictions go into metrics of torchmetrics as they are, and give what our own metrics give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nullbayes as nb

torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics: pip install torchmetrics")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning"),  # the networks are not trained
]

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), device="cpu")


def test_metrics_of_classes_take_probabilities_batch_by_batch() -> None:
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    posterior = nb.ProjectedPosterior(nn.Linear(4, 3), prior_precision=1.0).fit(X[:3], y[:3], 4, progress=False)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    error = torchmetrics.CalibrationError(task="multiclass", num_classes=3, n_bins=15)
    for start in range(0, 60, 25):
        probs = posterior.predict(X[start : start + 25]).probs
        accuracy.update(probs, y[start : start + 25])
        error.update(probs, y[start : start + 25])
    probs = posterior.predict(X).probs
    assert probs is not None
    assert float(accuracy.compute()) == pytest.approx(nb.metrics.accuracy(probs, y))
    assert float(error.compute()) == pytest.approx(nb.metrics.ece(probs, y, n_bins=15), abs=1e-5)


def test_metrics_of_detection_take_scores() -> None:
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    posterior = nb.ProjectedPosterior(nn.Linear(4, 3), prior_precision=1.0).fit(X[:3], y[:3], 4, progress=False)
    auroc = torchmetrics.AUROC(task="binary")
    inside, outside = posterior.ood_score(X, "max_variance"), posterior.ood_score(1.5 * X, "max_variance")
    both = torch.cat([inside, outside])  # torchmetrics takes what is outside [0, 1] for logits, which rounds
    auroc.update(both / both.max(), torch.cat([torch.zeros(60), torch.ones(60)]).long())
    assert float(auroc.compute()) == pytest.approx(nb.metrics.auroc(inside, outside), abs=1e-5)


def test_metrics_of_regressions_take_means() -> None:
    torch.manual_seed(0)
    y = X[:, :1] + 0.1
    posterior = nb.ProjectedPosterior(nn.Linear(4, 1), "regression", prior_precision=1.0)
    posterior.fit(X[:3], y[:3], 4, progress=False)
    error = torchmetrics.MeanSquaredError(squared=False)
    prediction = posterior.predict(X)
    error.update(prediction.mean, y)
    assert float(error.compute()) == pytest.approx(nb.metrics.rmse(prediction.mean, y), rel=1e-5)
