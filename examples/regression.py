"""Regression on three tables: intervals for new targets, from arrays.

Run: python examples/regression.py
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from torch import nn

import nullbayes as nb

TABLES = {"iris": (load_iris, 3), "wine": (load_wine, 9), "breast cancer": (load_breast_cancer, 3)}  # column to predict


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
        n = int(0.8 * len(x))
        posterior = nb.ProjectedPosterior(train(x[:n], y[:n], epochs), "regression").fit(x[:n], y[:n], progress=False)
        prediction = posterior.predict(x[n:])
        lower, upper = prediction.interval(0.9)
        strange = posterior.predict(x[n:] + 5.0)  # five standard deviations away
        found[name] = {
            "rmse": nb.metrics.rmse(prediction.mean, y[n:]),
            "coverage": nb.metrics.interval_coverage(lower, upper, y[n:]),
            "width": nb.metrics.interval_width(lower, upper),
            "CRPS": nb.metrics.crps(prediction.mean, prediction.variance + prediction.noise, y[n:]),
            "std": float(prediction.std.mean()),
            "std far away": float(strange.std.mean()),
        }
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found[name].items()))
    return found


if __name__ == "__main__":
    main()
