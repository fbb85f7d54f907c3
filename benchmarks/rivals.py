"""Every method in the same four steps: fit, choose a prior precision, predict, score; laplace-torch where it is."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import nullbayes as nb
from benchmarks.measure import seeded
from benchmarks.problems import Build, train

GRID = (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)  # of the paper
Loader = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Bench:
    """What a method is given."""

    model: nn.Module
    build: Build  # the same network, untrained
    loader: Loader
    held_out: Loader
    samples: int
    members: int
    epochs: int
    budget: int
    seed: int
    parameters: list[str] | None = None  # which may vary; all by default

    def generator(self) -> torch.Generator:
        """Return a fresh generator with the seed of this run."""
        return torch.Generator().manual_seed(self.seed)


class Ours:
    """A posterior or baseline of the library; predictions are those that the paper takes for it.

    Parameters
    ----------
    bench : Bench
        The problem.
    kind : type
        The method.
    pred_type : str
        "linearized" or "sampled".
    fitting : callable, optional
        Returns what its fit needs beside the data.
    score : str
        The score that the paper takes for it.
    settings : mapping
        For the method itself.
    """

    def __init__(
        self,
        bench: Bench,
        kind: Any,
        pred_type: str = "linearized",
        fitting: Callable[[Bench], Mapping[str, Any]] | None = None,
        *,
        score: str = "max_variance",
        **settings: Any,
    ) -> None:
        self.bench, self.pred_type, self._score = bench, pred_type, score
        self.posterior = kind(bench.model, parameters=bench.parameters, **settings)
        self._fitting = {"n_samples": bench.samples, **(fitting(bench) if fitting else {})}

    def fit(self) -> None:
        """Fit to the training data."""
        self.posterior.fit(self.bench.loader, generator=self.bench.generator(), progress=False, **self._fitting)

    def tune(self) -> float | None:
        """Choose the prior precision by held-out likelihood; None where there is none, or where it is known."""
        posterior = self.posterior
        if isinstance(posterior, nb.baselines.Baseline) and posterior.report.prior_precision is not None:
            return posterior.optimize_prior_precision(self.bench.held_out, "grid", pred_type=self.pred_type)
        return getattr(posterior.report, "prior_precision", None)

    def probs(self, x: Tensor) -> Tensor | None:
        """Return the probabilities of the mean prediction; None for a mere score."""
        if isinstance(self.posterior, (nb.baselines.LocalEnsemble, nb.baselines.SketchedLanczos)):
            return None
        return self.posterior.predict(x, pred_type=self.pred_type).probs

    def score(self, x: Tensor) -> Tensor:
        """Return the method's own score."""
        return self.posterior.ood_score(x, self._score, pred_type=self.pred_type)


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


def one_epoch(bench: Bench) -> dict[str, Any]:
    """For SWAG: SGD at the paper's rate, momentum and weight decay."""
    x, y = bench.loader[0]
    state: dict[int, torch.optim.Optimizer] = {}

    def epoch(model: nn.Module) -> None:
        optimizer = state.setdefault(
            id(model), torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=3e-4)
        )
        for batch in torch.randperm(len(x)).to(x.device).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    return {"train": epoch}


def new_members(bench: Bench) -> dict[str, Any]:
    """For deep ensembles: the same training from another start."""
    x, y = bench.loader[0]

    def member(seed: int) -> nn.Module:
        with seeded(seed):
            return train(bench.build().to(x.device), x, y, bench.epochs)

    return {"train": member, "n_samples": bench.members}


def methods(bench: Bench) -> dict[str, Callable[[], Any]]:
    """Return how each method is made, by name."""
    b = nb.baselines
    budget = {"memory_budget": bench.budget}
    table: dict[str, Callable[[], Any]] = {
        "ProjectedPosterior": lambda: Ours(bench, nb.ProjectedPosterior),
        "LossProjectedPosterior": lambda: Ours(bench, nb.LossProjectedPosterior),
        "MAP": lambda: Ours(bench, b.MAP, score="max_probability"),
        "DiagonalLaplace": lambda: Ours(bench, b.DiagonalLaplace, "sampled"),
        "LastLayerLaplace": lambda: Ours(bench, b.LastLayerLaplace, "sampled"),
        "LinearizedLaplace": lambda: Ours(bench, b.LinearizedLaplace),
        "LanczosLaplace": lambda: Ours(bench, b.LanczosLaplace, **budget),
        "SCOD": lambda: Ours(bench, b.SCOD, score="scod", **budget),
        "LocalEnsemble": lambda: Ours(bench, b.LocalEnsemble, score="local_ensemble", **budget),
        "SketchedLanczos": lambda: Ours(bench, b.SketchedLanczos, score="sketched_lanczos", **budget),
        "SWAG": lambda: Ours(bench, b.SWAG, "sampled", one_epoch),
        "DeepEnsemble": lambda: Ours(bench, b.DeepEnsemble, "sampled", new_members),
    }
    if importlib.util.find_spec("curvlinops") is not None:
        table["KroneckerLaplace"] = lambda: Ours(bench, b.KroneckerLaplace)
    if importlib.util.find_spec("laplace") is not None:
        for name, weights, hessian in (
            ("laplace-torch, diagonal", "all", "diag"),
            ("laplace-torch, Kronecker", "all", "kron"),
            ("laplace-torch, last layer", "last_layer", "full"),
        ):
            table[name] = lambda weights=weights, hessian=hessian: LaplaceTorch(bench, weights, hessian)
    return table
