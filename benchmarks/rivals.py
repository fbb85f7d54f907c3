"""laplace-torch in the same four steps as the library's own methods, where it is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.experiments.methods import Bench
from nullbayes.experiments.methods import methods as our_methods

GRID = (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)  # of the paper


class LaplaceTorch:
    """laplace-torch, with the variance of the linearized logits as its score."""

    def __init__(self, bench: Bench, weights: str, hessian: str) -> None:
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN

        backend = {} if hessian == "diag" else {"backend": CurvlinopsGGN}
        self.bench = bench
        self.inner = Laplace(
            bench.model, "classification", subset_of_weights=weights, hessian_structure=hessian, **backend
        )

    def fit(self) -> None:
        """Fit to the training data, in batches as its documentation does."""
        x, y = self.bench.loader[0]
        data = torch.utils.data.TensorDataset(x, y)
        self.inner.fit(torch.utils.data.DataLoader(data, batch_size=128))

    def tune(self) -> float:
        """Choose the prior precision by held-out likelihood, from the same grid."""
        x, y = self.bench.held_out[0]

        def score(alpha: float) -> float:
            self.inner.prior_precision = alpha
            return nb.metrics.nll(self.probs(x), y)

        found = {alpha: score(alpha) for alpha in GRID}
        best = min(found, key=lambda alpha: found[alpha] if math.isfinite(found[alpha]) else math.inf)
        self.inner.prior_precision = best
        return best

    def probs(self, x: Tensor) -> Tensor:
        """Return the probabilities of the mean prediction."""
        parts = [
            self.inner.predictive_samples(part, pred_type="glm", n_samples=self.bench.samples).mean(0)
            for part in x.split(256)
        ]
        return torch.cat(parts).clamp(0.0, 1.0)

    def score(self, x: Tensor) -> Tensor:
        """Return the largest variance of a linearized logit."""
        parts = [self.inner._glm_predictive_distribution(part)[1] for part in x.split(256)]
        return torch.cat(parts).diagonal(dim1=1, dim2=2).amax(1)


def methods(bench: Bench) -> dict[str, Callable[[], Any]]:
    """Return how each method is made, by name."""
    table = our_methods(bench)
    if importlib.util.find_spec("laplace") is not None:
        for name, weights, hessian in (
            ("laplace-torch, diagonal", "all", "diag"),
            ("laplace-torch, Kronecker", "all", "kron"),
            ("laplace-torch, last layer", "last_layer", "full"),
        ):
            table[name] = lambda weights=weights, hessian=hessian: LaplaceTorch(bench, weights, hessian)
    return table
