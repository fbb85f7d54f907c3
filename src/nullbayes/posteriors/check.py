"""How far predictions moved from the network's own, on any data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import DataError
from nullbayes.likelihoods import Bernoulli, Likelihood, Regression
from nullbayes.posteriors.spread import worst_ratio
from nullbayes.predictive import centred, nll, summarize


@dataclass(frozen=True)
class FitCheck:
    """How far a posterior's predictions moved from the network's own on some data.

    Attributes
    ----------
    n_data : int
        Examples checked.
    mean_shift, max_shift : float
        Root mean square and largest distance of the mean outputs from the network's, in units of the outputs: zero up
        to rounding for linearized predictions, whose mean is the network's output.
    std : float
        Root mean square standard deviation of the outputs.
    output_std : float
        The spread of the network's own outputs, to compare these with.
    worst_ratio : float or None
        Of several outputs in units of their own, the largest standard deviation as a part of the output's own spread.
    nll_model, nll_posterior : float
        Minus the mean log-likelihood of a target: of the network, and of the posterior's prediction.
    accuracy_model, accuracy_posterior : float or None
        Share of right classes (or right labels); None for likelihoods without classes.
    """

    n_data: int
    mean_shift: float
    max_shift: float
    std: float
    output_std: float
    worst_ratio: float | None
    nll_model: float
    nll_posterior: float
    accuracy_model: float | None
    accuracy_posterior: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Lay the check out as a table."""
        lines = [
            f"{self.n_data:,} examples; outputs spread by {self.output_std:.3g}",
            f"mean outputs moved by {self.mean_shift:.2g} (at most {self.max_shift:.2g}), "
            f"standard deviation {self.std:.2g}",
            f"nll      {self.nll_model:.4f} -> {self.nll_posterior:.4f}",
        ]
        if self.accuracy_model is not None and self.accuracy_posterior is not None:
            lines.append(f"accuracy {self.accuracy_model:.4f} -> {self.accuracy_posterior:.4f}")
        return "\n".join(lines)


def check_fit(
    likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor, link: str
) -> FitCheck:  # (N, ...), (S, N, ...)
    """Compare the predictions of samples, by how far each is from the network's outputs, with the network's own."""
    counted = counted_outputs(likelihood, outputs, targets)
    shift = changes.mean(0)[counted]
    mean, changes = outputs + changes.mean(0), centred(changes)

    def accuracy(changes: Tensor | None) -> float | None:
        if not likelihood.has_probabilities:
            return None
        if changes is None:
            return likelihood.accuracy(likelihood.probabilities(outputs), targets)
        probs = summarize(mean, changes, likelihood, link).probs
        assert probs is not None
        return likelihood.accuracy(probs, targets)

    return FitCheck(
        n_data=len(outputs),
        mean_shift=float(shift.square().mean().sqrt()),
        max_shift=float(shift.abs().max()),
        std=float(changes.var(0)[counted].mean().sqrt()),
        output_std=likelihood.spread(outputs, targets),
        worst_ratio=_worst_ratio(likelihood, outputs, changes),
        nll_model=nll(likelihood, outputs, None, targets),
        nll_posterior=nll(likelihood, mean, changes, targets, link),
        accuracy_model=accuracy(None),
        accuracy_posterior=accuracy(changes),
    )


def _worst_ratio(likelihood: Likelihood, outputs: Tensor, changes: Tensor) -> float | None:
    """Return the standard deviation of the output that varies most, as a part of its own spread."""
    if outputs.ndim != 2 or outputs.shape[1] == 1 or not isinstance(likelihood, (Bernoulli, Regression)):
        return None
    return worst_ratio(changes.var(0).mean(0).sqrt(), outputs.std(0, unbiased=False))


def counted_outputs(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:  # bool (N, ...)
    """Return which outputs the targets speak of; refuse targets that speak of none."""
    counted = likelihood.counted(outputs, targets)
    counted = torch.ones_like(outputs, dtype=torch.bool) if counted is None else counted
    if not bool(counted.any()):
        msg = "Every target is one to be ignored (ignore_index): there is nothing to compare predictions with."
        raise DataError(msg)
    return counted
