"""The prediction of a posterior: its intervals, and its export to arrays and tables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError, SettingsError, optional
from nullbayes.predictive import plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


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

    def reshaped(self, change: Callable[[Tensor], Tensor]) -> Prediction:
        """Return the prediction with outputs of another shape: ``change`` is applied to whatever has one entry each."""
        probs = None if self.probs is None else change(self.probs)
        mean, variance, samples = (change(tensor) for tensor in (self.mean, self.variance, self.samples))
        noise = self.noise  # of each output of each input, or shared by all inputs
        noise = change(noise) if noise is not None and noise.shape == self.mean.shape else noise
        return replace(self, mean=mean, variance=variance, probs=probs, samples=samples, noise=noise)

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
        with optional("to_pandas()"):
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
            array = array.reshape(len(array), -1)
            width = array.shape[1]
            columns |= {name if width == 1 else f"{name}_{i}": array[:, i] for i in range(width)}
        index = pd.RangeIndex(len(self.mean), name="input") if self.index is None else self.index
        return pd.DataFrame(columns, index=index)

    def plot(self, path: str | os.PathLike[str] | None = None, *, n_inputs: int = 4) -> Figure:
        """Draw the prediction: probabilities with their spread over the samples, or sorted means with a band.

        Parameters
        ----------
        path : path, optional
            Where to save the figure.
        n_inputs : int
            How many inputs of a classifier are drawn, or outputs of a regression: the first ones.

        Returns
        -------
        matplotlib.figure.Figure
            The figure, which needs no display. Probabilities have bars, and lines from the 5 % to the 95 % quantile of
            the samples at temperature 1; means have a band of two standard deviations, without the noise.
        """
        figure = plot.draw(self, n_inputs)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def __repr__(self) -> str:
        """Return the shapes of the tensors."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        shapes = (
            f"{name} {tuple(value.shape) if isinstance(value, Tensor) else None}"
            for name, value in found.items()
            if isinstance(value, Tensor) or name == "probs"
        )
        return f"Prediction({', '.join(shapes)})"
