"""The prediction of a posterior, its intervals and export to arrays and tables, and out-of-distribution scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nullbayes.errors import DataError, LikelihoodError, SettingsError, warn
from nullbayes.likelihoods import Likelihood

if TYPE_CHECKING:
    import pandas as pd

PER = ("input", "position")


@dataclass(frozen=True)
class Prediction:
    """The prediction of a posterior for N inputs, as returned by ``posterior.predict(x)``.

    Attributes
    ----------
    mean : Tensor (N, ...)
        Mean of the outputs (logits for a classifier): the outputs of the network for linearized predictions, the mean
        over the samples for sampled ones.
    variance : Tensor (N, ...)
        Variance of the outputs under the posterior. It does not include the noise of a regression.
    probs : Tensor (N, ...) or None
        Probabilities, averaged over the posterior and at its temperature; None for a regression or a custom loss.
    samples : Tensor (S, N, ...)
        Outputs of each sample, in the shape that the model returns, usually (S, N, O).
    noise : Tensor or None
        Variance of the noise of a regression, one number or one per output; None for other likelihoods.
    mask : Tensor (N, ...) or None
        Which positions of each input count, if outputs have positions and a mask was given or found.
    likelihood : str
        Name of the likelihood.
    index : pandas.Index or None
        Index of the table that was predicted, if it was one.

    Examples
    --------
    >>> import torch
    >>> prediction = Prediction(torch.zeros(3, 1), torch.ones(3, 1), None, torch.zeros(2, 3, 1), torch.tensor(3.0))
    >>> prediction.std.flatten(), prediction.interval(0.9)[1].flatten()
    (tensor([1., 1., 1.]), tensor([3.2897, 3.2897, 3.2897]))
    """

    mean: Tensor
    variance: Tensor
    probs: Tensor | None
    samples: Tensor
    noise: Tensor | None = None
    mask: Tensor | None = None
    likelihood: str = ""
    index: Any = None

    @property
    def std(self) -> Tensor:  # (N, ...)
        """Standard deviation of the outputs, without the noise of a regression."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:  # (N, ...) each
        """Return the central interval of new targets of a regression, including the noise.

        Parameters
        ----------
        level : float
            The probability that a new target lies in the interval.

        Returns
        -------
        lower, upper : Tensor (N, ...)
            The bounds.

        Raises
        ------
        LikelihoodError
            If the likelihood is not a regression.
        """
        if self.noise is None:
            msg = "Intervals are for regressions; for a classifier, use probs."
            raise LikelihoodError(msg)
        if not 0.0 < level < 1.0:
            msg = f"level must be between 0 and 1, such as 0.9, not {level!r}."
            raise SettingsError(msg)
        normal = torch.erfinv(torch.tensor(level, dtype=torch.float64, device="cpu"))
        half = math.sqrt(2.0) * float(normal) * (self.variance + self.noise).sqrt()
        return self.mean - half, self.mean + half

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return a dictionary of arrays: mean, variance, std, probs, samples, noise and mask, without those None."""
        found = {field.name: getattr(self, field.name) for field in fields(self)} | {"std": self.std}
        return {name: value.detach().cpu().numpy() for name, value in found.items() if isinstance(value, Tensor)}

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of lists for JSON: all arrays but the samples."""
        return {name: array.tolist() for name, array in self.to_numpy().items() if name != "samples"}

    def to_pandas(self, level: float = 0.9) -> pd.DataFrame:
        """Return a table with one row per input, and the index of the table that was predicted, if it was one.

        Parameters
        ----------
        level : float
            Level of the interval of a regression.

        Returns
        -------
        pandas.DataFrame
            The mean and std of each output. For a regression also the bounds of the interval; for classes the predicted
            class, its probability, and the probability of each class; for labels the probability of each, and whether
            it is at least one half. Outputs with more dimensions have one row per entry, and an index that locates it.
        """
        import pandas as pd

        arrays = {name: array for name, array in self.to_numpy().items() if name in ("mean", "std", "probs")}
        if self.noise is not None:
            bounds = (bound.detach().cpu().numpy() for bound in self.interval(level))
            arrays |= dict(zip((f"lower_{level:g}", f"upper_{level:g}"), bounds, strict=True))
        if self.mean.ndim > 2:
            names = ["input", *(f"position_{i}" for i in range(1, self.mean.ndim))]
            index = pd.MultiIndex.from_product([range(size) for size in self.mean.shape], names=names)
            return pd.DataFrame({name: array.ravel() for name, array in arrays.items()}, index=index)
        columns: dict[str, Any] = {}
        probs = arrays.pop("probs", None)
        if probs is not None and self.likelihood == "classification":
            columns = {"predicted": probs.argmax(1), "probability": probs.max(1)}
        elif probs is not None:
            arrays = {"predicted": probs >= 0.5, **arrays}
        arrays |= {} if probs is None else {"prob": probs}
        for name, array in arrays.items():
            width = array.shape[1]
            columns |= {name if width == 1 else f"{name}_{i}": array[:, i] for i in range(width)}
        index = pd.RangeIndex(len(self.mean), name="input") if self.index is None else self.index
        return pd.DataFrame(columns, index=index)

    def __repr__(self) -> str:
        """Return the shapes of the tensors."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        shapes = (
            f"{name} {tuple(value.shape) if isinstance(value, Tensor) else None}"
            for name, value in found.items()
            if isinstance(value, Tensor) or name == "probs"
        )
        return f"Prediction({', '.join(shapes)})"


def _variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    noise = prediction.noise
    if noise is None or noise.numel() == 1:
        return prediction.variance
    return prediction.variance / noise  # outputs may have different units


def _probability_variance(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    return likelihood.probabilities(prediction.samples).var(0)


def _entropy(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    assert prediction.probs is not None
    return likelihood.entropy_terms(prediction.probs)


def _mutual_information(prediction: Prediction, likelihood: Likelihood) -> Tensor:
    probs = likelihood.probabilities(prediction.samples)
    return likelihood.entropy_terms(probs.mean(0)) - likelihood.entropy_terms(probs).mean(0)


# The contribution (N, ...) of each output to a score. A score whose name begins with "max" takes the largest over the
# outputs and positions of an input; the others sum over outputs and take the mean over positions.
_TERMS: dict[str, Callable[[Prediction, Likelihood], Tensor]] = {
    "max_variance": _variance,  # the paper's text
    "sum_variance": _variance,
    "max_prob_variance": _probability_variance,  # the authors' code
    "entropy": _entropy,  # of the mean prediction
    "mutual_information": _mutual_information,  # the part of the entropy that is due to disagreement between samples
}
SCORES = tuple(_TERMS)
WITHOUT_PROBABILITIES = ("max_variance", "sum_variance")  # scores that every likelihood has


def score(prediction: Prediction, likelihood: Likelihood, kind: str, per: str = "input") -> Tensor:  # (N,) or (N, ...)
    """Return one score per input or per position; high scores mean out-of-distribution.

    Scores do not depend on the units of the outputs of a regression, nor on the length of an input. Masked positions do
    not count; with ``per="position"`` their score is NaN.
    """
    if kind not in SCORES:
        msg = f"kind must be one of {', '.join(SCORES)}, not {kind!r}."
        raise SettingsError(msg)
    if per not in PER:
        msg = f"per must be one of {', '.join(PER)}, not {per!r}."
        raise SettingsError(msg)
    if kind not in WITHOUT_PROBABILITIES and prediction.probs is None:
        msg = (
            f"kind={kind!r} needs probabilities, which a {likelihood.name} likelihood does not have: "
            "use 'max_variance'."
        )
        raise LikelihoodError(msg)
    values = likelihood.at_positions(_TERMS[kind](prediction, likelihood), largest=kind.startswith("max"))
    values = values.clamp_min(0.0) if kind == "mutual_information" else values  # rounding may make it negative
    return pooled(values, prediction.mask, kind, per)


def pooled(values: Tensor, mask: Tensor | None, kind: str, per: str = "input") -> Tensor:  # (N, ...)
    """Return the scores of positions, or combine those that count into one score per input."""
    if per == "position":
        return values if mask is None else values.masked_fill(~mask, torch.nan)
    if values.ndim == 1:
        return values
    flat = values.flatten(1)
    counted = torch.ones_like(flat, dtype=torch.bool) if mask is None else mask.flatten(1)
    if not bool(counted.any(1).all()):
        empty = int((~counted.any(1)).nonzero()[0])
        msg = f"The mask leaves nothing of input {empty}: every input must have a position that counts."
        raise DataError(msg)
    if kind.startswith("max"):
        return flat.masked_fill(~counted, -torch.inf).amax(1)
    return flat.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)


def warn_of_padding(likelihood: Likelihood, prediction: Prediction) -> None:
    """Warn that padding may be part of the scores of a prediction with positions."""
    if len(likelihood.positions(prediction.mean)) < 2:
        return
    if likelihood.some_ignored and prediction.mask is None:
        message = (
            "Training targets ignored some positions (padding?), but these inputs come without a mask, so every "
            "position counts in their scores."
        )
    elif likelihood.more_ignored:
        message = (
            "Training targets ignored positions that attention_mask counts (special tokens, parts of words?). Nothing "
            "holds the outputs there, and they count in these scores."
        )
    else:
        return
    warn(f'{message} Pass mask=..., true where a position counts, or mask="all".')
