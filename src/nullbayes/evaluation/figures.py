"""The figures of merit of a score, with bootstrap intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from nullbayes.evaluation.judging import Judged
from nullbayes.metrics import aupr, auroc, fpr95

Figures = dict[str, float]
Intervals = dict[str, tuple[float, float]]
_ENDS = (0.05, 0.95)  # of the intervals


def figures(
    judged: Judged | None, inside: Tensor, strangers: Mapping[str, Tensor]
) -> tuple[Figures, dict[str, Figures]]:
    """Return the figures of predictions of familiar data, and those of the detection of each set of strangers."""
    detection = {
        name: {"auroc": auroc(inside, outside), "aupr": aupr(inside, outside), "fpr95": fpr95(inside, outside)}
        for name, outside in strangers.items()
    }
    return {} if judged is None else judged.figures(inside), detection


def intervals(
    judged: Judged | None, inside: Tensor, strangers: Mapping[str, Tensor], n_resamples: int, seed: int
) -> tuple[Intervals, dict[str, Intervals]]:
    """Return 90 % percentile intervals over resamples of the examples of each set.

    The expected calibration error has none: it is larger for most resamples than for the data themselves. The same seed
    resamples the same examples, so that methods are compared on the same resamples.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[str | None, str], list[float]] = defaultdict(list)
    for _ in range(n_resamples):
        index = _resample(len(inside), generator)
        drawn = {name: outside[_resample(len(outside), generator)] for name, outside in strangers.items()}
        own, detection = figures(None if judged is None else judged.take(index), inside[index], drawn)
        for name, value in own.items():
            found[None, name].append(value)
        for group, values in detection.items():
            for name, value in values.items():
                found[group, name].append(value)
    ends: dict[str | None, Intervals] = {None: {}, **{name: {} for name in strangers}}
    shares = torch.tensor(_ENDS, dtype=torch.float64, device="cpu")
    for (where, name), drawn_values in found.items():
        low, high = torch.tensor(drawn_values, dtype=torch.float64, device="cpu").quantile(shares)
        ends[where][name] = (float(low), float(high))
    return ends[None], {name: ends[name] for name in strangers}


def _resample(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(n, (n,), generator=generator, device="cpu")
