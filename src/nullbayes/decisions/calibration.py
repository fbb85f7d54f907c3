"""What `calibrate` found, as one value that a file holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.decisions.conformal import n_equal, p_values
from nullbayes.decisions.weights import Weights
from nullbayes.errors import FileError, warn

_SHOWN = 0.005  # the least weight of a low statistic that is printed
_CALIBRATED = 0.2  # of the scores may be those of ranked inputs
_TENSORS = ("scores", "errors", "position_scores")


@dataclass(frozen=True, eq=False)
class Calibration:
    """What ``posterior.calibrate`` found; prints as a short table.

    Attributes
    ----------
    kind : str
        The score that decisions go by; "combined" is a weighted sum of standardized statistics.
    statistics : tuple of str
        The statistics of a combined score.
    combine : Weights or None
        Their weights, and the mean and the standard deviation of each on held-out data; None for another score.
    strangers : tuple of str
        The kinds of artificial strangers that the weights were learned from.
    n_learned : int
        How many held-out examples the weights were learned from. The others are ranked.
    scores : Tensor (m,)
        Scores of the held-out examples that are ranked.
    errors : Tensor (k,) or (k, O), or None
        How far predictions were from the targets of all held-out examples, without those whose targets are ignored;
        None without targets.
    position_kind : str
        The score of single positions, if outputs have positions; else empty.
    position_scores : Tensor (k,) or None
        That score at one random position of each of these examples.
    mask : str
        How positions were masked: "all" or "given" if a mask was passed, else empty.
    prior_precision, temperature, n_samples : float, float, int
        Of the posterior when it was calibrated. With others it has to be calibrated again.
    sigma_noise : tuple of float
        The noise of a regression when it was calibrated; else empty.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(300, 4, generator=generator)
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.eye(4)[:, :3]})
    >>> posterior = nb.baselines.DiagonalLaplace(model).fit(x[:100], x[:100, :3].argmax(1))
    >>> posterior = posterior.calibrate(x[100:], x[100:, :3].argmax(1))
    >>> posterior.calibration.kind, posterior.calibration.n_learned, len(posterior.calibration.scores)
    ('combined', 100, 100)
    """

    kind: str
    statistics: tuple[str, ...]
    combine: Weights | None
    strangers: tuple[str, ...]
    n_learned: int
    scores: Tensor
    errors: Tensor | None
    position_kind: str
    position_scores: Tensor | None
    mask: str
    prior_precision: float
    temperature: float
    n_samples: int
    sigma_noise: tuple[float, ...] = ()

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each statistic of a combined score; empty for another score.

        "low energy" is that of an energy that is unusually low, which counts for rows of a table alone.
        """
        if self.combine is None:
            return {}
        low = {f"low {name}": weight for name, weight in zip(self.statistics, self.combine.low, strict=False)}
        return dict(zip(self.statistics, self.combine.weights, strict=True)) | low

    def p_value(self, scores: Tensor) -> Tensor:
        """Return the p-values of inputs with these calibrated scores, as ``posterior.p_value`` does for the inputs.

        Parameters
        ----------
        scores : Tensor (N,)
            What ``posterior.ood_score(x)`` returned, or ``scores_in`` and ``scores_out`` of the calibrated row of an
            evaluation.

        Returns
        -------
        Tensor (N,)
            In float64, on the device of the scores.
        """
        return p_values(self.scores.to(scores.device), scores.double())

    def warn_of_ranked(self, scores: Tensor, name: str) -> None:  # (N,)
        """Warn if many of some calibrated scores are those of held-out inputs that were ranked: see `evaluate`."""
        found = n_equal(self.scores, scores.to(self.scores))
        if found > _CALIBRATED * min(len(scores), len(self.scores)):
            warn(
                f"At least {found:,} of the {len(scores):,} inputs have calibrated {name!r}, so that its false alarms "
                "are alpha whatever it does. Calibrate with one part of the held-out data, and evaluate with another."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings, for JSON; of the ranked examples their number alone."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _TENSORS}
        combine = None if self.combine is None else {k: list(v) for k, v in dataclasses.asdict(self.combine).items()}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return {**plain, "combine": combine, "n_ranked": len(self.scores)}

    def __str__(self) -> str:
        """Lay the calibration out as a table."""
        lines = [("score", self.kind)]
        lines += [
            (f"  {name}", f"{weight:.2f}")
            for name, weight in self.weights.items()
            if name in self.statistics or weight >= _SHOWN
        ]
        if self.combine is not None:
            kinds = ", ".join(self.strangers).replace("_", " ")
            how = f"learned from {self.n_learned:,} held-out examples and strangers: {kinds}"
            lines.append(("weights", how if kinds else "equal: no strangers could be made of these inputs"))
        lines.append(("ranked", f"{len(self.scores):,} held-out examples"))
        width = max(17, *(len(name) for name, _ in lines))
        return "\n".join(f"{name:<{width}} {value}" for name, value in lines)


def _check(found: Calibration) -> None:
    """Refuse values that no calibration has."""
    numbers = (found.prior_precision, found.temperature, found.n_samples, found.n_learned, *found.sigma_noise)
    texts = (found.kind, found.position_kind, found.mask, *found.statistics, *found.strangers)
    *parts, low, usual = ((), ()) if found.combine is None else dataclasses.astuple(found.combine)
    if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
        msg = "settings that are no numbers"
        raise ValueError(msg)
    if not all(isinstance(text, str) for text in texts) or bool(found.statistics) != bool(parts):
        msg = "kinds and statistics that do not fit"
        raise ValueError(msg)
    if (
        not all(math.isfinite(number) for part in (*parts, low, usual) for number in part)
        or any(weight < 0.0 or scale <= 0.0 for weight, _, scale, _ in zip(*parts, strict=True))
        or any(weight < 0.0 for weight in low)
    ):
        msg = "weights that are no weights"
        raise ValueError(msg)
    for name, most in (("scores", 1), ("errors", 2), ("position_scores", 1)):
        tensor = getattr(found, name)
        if tensor is None and name != "scores":
            continue
        if not 1 <= tensor.ndim <= most or tensor.dtype != torch.float64 or bool(tensor.isnan().any()):
            msg = f"{name} that are no numbers"
            raise ValueError(msg)
    if not len(found.scores) or not bool(torch.isfinite(found.scores).all()):
        msg = "scores that are no numbers"
        raise ValueError(msg)
    if bool(found.position_kind) != (found.position_scores is not None):
        msg = "a score of positions without its kind"
        raise ValueError(msg)


def to_file(calibration: Calibration | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return what the header and the tensors of a file hold."""
    if calibration is None:
        return None, {}
    tensors = {f"calibration.{name}": getattr(calibration, name) for name in _TENSORS}
    return calibration.to_dict(), {name: tensor for name, tensor in tensors.items() if tensor is not None}


def from_file(header: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> Calibration | None:
    """Return what a file holds, or refuse a file that was altered."""
    if header is None:
        return None
    try:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in header.items()
            if name != "n_ranked"
        }
        combine = values["combine"]
        if combine is not None:
            combine = Weights(**{name: tuple(map(float, numbers)) for name, numbers in combine.items()})
            n = len(values["statistics"])
            parts = (combine.weights, combine.mean, combine.scale, combine.low or combine.weights)
            if not n or any(len(part) != n for part in parts) or len(combine.low) != len(combine.usual):
                msg = "other numbers of statistics and weights"
                raise ValueError(msg)
        held: dict[str, Any] = {name: tensors.get(f"calibration.{name}") for name in _TENSORS}
        found = Calibration(**{**values, "combine": combine, **held})
        _check(found)
        return found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"The calibration of the file was altered: fit, calibrate and save again ({error})."
        raise FileError(msg) from error
