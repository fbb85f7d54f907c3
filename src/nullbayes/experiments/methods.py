"""Both posteriors and every baseline in the same four steps: fit, choose a prior precision, predict, score."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.experiments.tasks import Inputs, take

Loader = list[tuple[Inputs, Tensor]]


@dataclass(frozen=True)
class Bench:
    """What a method is given."""

    model: nn.Module
    loader: Loader
    held_out: Loader
    samples: int
    members: int
    budget: int
    seed: int
    parameters: Sequence[str] | None = None  # which may vary; all by default
    member: Callable[[int], nn.Module] | None = None  # trains another network, where that is possible

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
        self.posterior: Any = kind(bench.model, **{"parameters": bench.parameters, **settings})
        self._fitting = {"n_samples": bench.samples, **(fitting(bench) if fitting else {})}

    def fit(self) -> None:
        """Fit to the training data."""
        self.posterior.fit(self.bench.loader, generator=self.bench.generator(), progress=False, **self._fitting)

    def tune(self) -> float | None:
        """Choose the prior precision by held-out likelihood; None where there is none, or where it is known."""
        posterior = self.posterior
        if isinstance(posterior, nb.baselines.Baseline) and posterior.report.prior_precision is not None:
            chosen: float = posterior.optimize_prior_precision(self.bench.held_out, "grid", pred_type=self.pred_type)
            return chosen
        return getattr(posterior.report, "prior_precision", None)

    def probs(self, x: Inputs) -> Tensor | None:
        """Return the probabilities of the mean prediction; None for a mere score."""
        if isinstance(self.posterior, (nb.baselines.LocalEnsemble, nb.baselines.SketchedLanczos)):
            return None
        probs: Tensor | None = self.posterior.predict(x, pred_type=self.pred_type).probs
        return probs

    def score(self, x: Inputs) -> Tensor:
        """Return the method's own score."""
        scores: Tensor = self.posterior.ood_score(x, self._score, pred_type=self.pred_type)
        return scores


def one_epoch(bench: Bench) -> dict[str, Any]:
    """For SWAG: SGD at the paper's rate, momentum and weight decay."""
    x, y = bench.loader[0]
    state: dict[int, torch.optim.Optimizer] = {}

    def epoch(model: nn.Module) -> None:
        optimizer = state.setdefault(
            id(model), torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=3e-4)
        )
        for batch in torch.randperm(len(y)).to(y.device).split(128):
            optimizer.zero_grad()
            inputs = take(x, batch)
            logits = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
            nn.functional.cross_entropy(logits, y[batch]).backward()
            optimizer.step()

    return {"train": epoch}


def new_members(bench: Bench) -> dict[str, Any]:
    """For deep ensembles: the same training from another start."""
    return {"train": bench.member, "n_samples": bench.members}


def methods(bench: Bench) -> dict[str, Callable[[], Any]]:
    """Return how each method is made, by name."""
    b = nb.baselines
    budget: dict[str, Any] = {"memory_budget": bench.budget}
    table: dict[str, Callable[[], Any]] = {
        "ProjectedPosterior": lambda: Ours(bench, nb.ProjectedPosterior),
        "LossProjectedPosterior": lambda: Ours(bench, nb.LossProjectedPosterior),
        "MAP": lambda: Ours(bench, b.MAP, score="max_probability"),
        "DiagonalLaplace": lambda: Ours(bench, b.DiagonalLaplace, "sampled"),
        "LastLayerLaplace": lambda: Ours(bench, b.LastLayerLaplace, "sampled", parameters=None),
        "LinearizedLaplace": lambda: Ours(bench, b.LinearizedLaplace),
        "LanczosLaplace": lambda: Ours(bench, b.LanczosLaplace, **budget),
        "SCOD": lambda: Ours(bench, b.SCOD, score="scod", **budget),
        "LocalEnsemble": lambda: Ours(bench, b.LocalEnsemble, score="local_ensemble", **budget),
        "SketchedLanczos": lambda: Ours(bench, b.SketchedLanczos, score="sketched_lanczos", **budget),
        "SWAG": lambda: Ours(bench, b.SWAG, "sampled", one_epoch, parameters=None),
    }
    if bench.member is not None:
        table["DeepEnsemble"] = lambda: Ours(bench, b.DeepEnsemble, "sampled", new_members)
    if importlib.util.find_spec("curvlinops") is not None:
        table["KroneckerLaplace"] = lambda: Ours(bench, b.KroneckerLaplace)
    return table
