"""Regression on two tables: intervals for new targets, from arrays, and rows that are unlike the others.

Run: python examples/regression.py
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import nn

import nullbayes as nb

TABLES = {"diabetes": (load_diabetes, 8), "breast cancer": (load_breast_cancer, 3)}  # column to predict


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return standardized columns, and the one to be predicted from the others."""
    load, target = TABLES[name]
    data = load().data
    data = (data - data.mean(0)) / data.std(0)
    data = data[np.random.default_rng(0).permutation(len(data))]
    return np.delete(data, target, axis=1), data[:, [target]]


def train(x: np.ndarray, y: np.ndarray, epochs: int) -> nn.Module:
    """Return a small network, trained as usual."""
    torch.manual_seed(0)
    inputs, targets = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def main(epochs: int = 150) -> dict[str, dict[str, float]]:
    """Fit a posterior to each table; print how its intervals do on rows that it never saw."""
    found = {}
    for name in TABLES:
        x, y = table(name)
        n, m = int(0.5 * len(x)), int(0.75 * len(x))  # rows to learn from, and those after them to calibrate with
        posterior = nb.ProjectedPosterior(train(x[:n], y[:n], epochs), "regression").fit(x[:n], y[:n], progress=False)
        posterior.calibrate(x[n:m], y[n:m], kind="max_variance")  # one score, nothing to learn: all rows are ranked
        new, far = x[m:], x[m:] + 5.0  # five standard deviations away
        prediction, strange = posterior.predict(new), posterior.predict(far)
        lower, upper = prediction.interval(0.9)
        calibrated = posterior.predict_interval(new, alpha=0.1)
        found[name] = {
            "rmse": nb.metrics.rmse(prediction.mean, y[m:]),
            "coverage": nb.metrics.interval_coverage(lower, upper, y[m:]),
            "width": nb.metrics.interval_width(lower, upper),
            "calibrated coverage": nb.metrics.interval_coverage(*calibrated, y[m:]),
            "calibrated width": nb.metrics.interval_width(*calibrated),
            "CRPS": nb.metrics.crps(prediction.mean, prediction.variance + prediction.noise, y[m:]),
            "std": float(prediction.std.mean()),
            "std far away": float(strange.std.mean()),
            "flagged": float(posterior.is_ood(new).double().mean()),
            "flagged far away": float(posterior.is_ood(far).double().mean()),
        }
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found[name].items()))
    return found


if __name__ == "__main__":
    main()
