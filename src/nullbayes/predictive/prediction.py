"""What a posterior says about some inputs, and how to take it elsewhere: intervals, arrays, tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nullbayes.errors import LikelihoodError, SettingsError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Prediction:
    """What the posterior says about N inputs.

    Attributes
    ----------
    mean : Tensor (N, ...)
        Mean of the outputs (logits, for a classifier): the network's own outputs for linearized predictions, the mean
        over the samples for sampled ones.
    variance : Tensor (N, ...)
        Their variance: how far the training data leave the output open. A regression's noise is not in it.
    probs : Tensor (N, ...) or None
        Probabilities, averaged over the posterior and at its temperature; None for likelihoods without any.
    samples : Tensor (S, N, ...)
        The outputs of each sample, in the shape that the model gives them: (N, O) for most.
    noise : Tensor or None
        Variance of a regression's noise, one number or one for each output; None for other likelihoods.
    mask : Tensor (N, ...) or None
        Which positions of each input count, where outputs have positions and a mask was given or found.
    likelihood : str
        The name of the likelihood.
    index : pandas.Index or None
        That of the table which was predicted, if it was one.
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
        """Standard deviation of the outputs, without a regression's noise."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:  # (N, ...) each
        """Return the bounds between which a new target lies with a probability, the noise included.

        Parameters
        ----------
        level : float
            The probability.

        Examples
        --------
        >>> lower, upper = posterior.predict(x).interval(0.9)  # doctest: +SKIP
        """
        if self.noise is None:
            msg = "Intervals are for regressions: a classifier's answer is its probs."
            raise LikelihoodError(msg)
        if not 0.0 < level < 1.0:
            msg = f"level must be between 0 and 1, such as 0.9, not {level!r}."
            raise SettingsError(msg)
        normal = torch.erfinv(torch.tensor(level, dtype=torch.float64, device="cpu"))
        half = math.sqrt(2.0) * float(normal) * (self.variance + self.noise).sqrt()
        return self.mean - half, self.mean + half

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return mean, variance, std, probs, samples, noise and mask as arrays, by name; what there is of them."""
        found = {field.name: getattr(self, field.name) for field in fields(self)} | {"std": self.std}
        return {name: value.detach().cpu().numpy() for name, value in found.items() if isinstance(value, Tensor)}

    def to_dict(self) -> dict[str, Any]:
        """Return the same as lists, for JSON, without the samples."""
        return {name: array.tolist() for name, array in self.to_numpy().items() if name != "samples"}

    def to_pandas(self, level: float = 0.9) -> pd.DataFrame:
        """Return a table with a row for each input, and the index of the table that was predicted, if it was one.

        Its columns are mean and std of each output, and the bounds of the interval for a regression; for classes the
        predicted one, its probability, and the probability of each; for labels whether each is predicted (a probability
        of one half or more), and its probability. Outputs with more dimensions have a row for each entry, and an index
        that says where it is.
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
        """Give the shapes; the numbers would fill pages."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        shapes = (
            f"{name} {tuple(value.shape) if isinstance(value, Tensor) else None}"
            for name, value in found.items()
            if isinstance(value, Tensor) or name == "probs"
        )
        return f"Prediction({', '.join(shapes)})"
