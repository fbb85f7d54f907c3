"""Detectors that use the last linear layer: ViM, ReAct, SCALE and fDBD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.method import LikelihoodLike, Options, check_counts
from nullbayes.detectors.features import (
    WIDE,
    Detector,
    FeatureScore,
    Tensors,
    Training,
    check_fraction,
    energy,
    moments,
)
from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.features import Head, Seen
from nullbayes.linalg.spectral import eigh, relative_cutoff

_MOST = 50_000  # training examples that a quantile is taken of


@dataclass(frozen=True)
class _VirtualLogit(FeatureScore):
    directions: int | None = None

    needs_head = True
    layout = {"origin": "d", "rest": "dr", "scale": ""}  # noqa: RUF012 - a constant
    own_score = "vim"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts({"directions": self.directions})

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        assert head is not None
        origin = -torch.linalg.pinv(head.weight.double()) @ head.bias.double()
        around = moments(training.features, origin[None], torch.zeros_like(training.classes))
        values, vectors = eigh(around)  # ascending
        rank = int((values > values[-1] * relative_cutoff(len(values), training.features.dtype)).sum())
        kept = _principal(rank) if self.directions is None else self.directions
        if kept >= rank:
            msg = (
                f"The training features vary in {rank} directions, so nothing of them is outside of {kept} principal "
                f"ones: leave directions out, or pass fewer, and more training examples if there are few."
            )
            raise SettingsError(msg)
        rest = vectors[:, : len(values) - kept]
        lengths = [((some.double() - origin) @ rest).norm(dim=1).sum() for some in training.features.split(WIDE)]
        scale = training.outputs.double().amax(1).sum() / torch.stack(lengths).sum()
        return {"origin": origin, "rest": rest.contiguous(), "scale": scale}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        outside = (seen.features.double() - tensors["origin"]) @ tensors["rest"]
        found: Tensor = tensors["scale"] * outside.norm(dim=1) + energy(seen.outputs.double())
        return found.to(seen.outputs.dtype)


def _principal(rank: int) -> int:
    """Return the number of principal directions: that of the authors' code for wide features, else one half."""
    return 1000 if rank >= 2048 else 512 if rank >= 768 else rank // 2


class ViM(Detector):
    r"""Virtual-logit matching: unusual features against confident logits (Wang, Li, Feng and Zhang 2022).

    With the origin :math:`o = -W^{+} b` of the last layer, the features :math:`f - o` have a part outside of their
    principal directions on the training data. Its length, scaled to the size of the largest logits, is a logit of its
    own; the score is :math:`\alpha \|(f - o)^\perp\| - \log \sum_c e^{z_c}`, which orders inputs as the probability of
    that logit does.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", with outputs (n, C). It must end in a linear
        layer.
    directions : int, optional
        The number of principal directions. By default it follows from the number r of directions in which the training
        features vary: 1,000 if r is at least 2,048, 512 if it is at least 768, else r/2.
    features : str, optional
        The name of the last linear layer, whose inputs are the features; by default it is found.
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x, y = torch.tensor([[4.0, 1.0], [-4.0, 1.0]]), torch.tensor([0, 1])
    >>> model = torch.nn.Linear(2, 2)
    >>> _ = model.load_state_dict({"weight": torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), "bias": torch.zeros(2)})
    >>> nb.detectors.ViM(model).fit(x, y).ood_score(torch.tensor([[4.0, 1.0], [4.0, 3.0]]))
    tensor([-3.3541e-04,  7.9997e+00])
    """

    _method = _VirtualLogit()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        directions: int | None = None,
        features: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _VirtualLogit(features, directions)


@dataclass(frozen=True)
class _Clipped(FeatureScore):
    quantile: float = 0.9

    needs_head = True
    most = _MOST
    layout = {"limit": ""}  # noqa: RUF012 - a constant
    own_score = "react"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("quantile", self.quantile)

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        ordered = training.features.flatten().sort().values
        if not len(ordered):
            msg = "Every training target is ignored: there are no features to learn from."
            raise DataError(msg)
        place = self.quantile * (len(ordered) - 1)
        low = ordered[int(place)]
        high = ordered[min(int(place) + 1, len(ordered) - 1)]
        return {"limit": low + (high - low) * (place - int(place))}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        assert head is not None
        return energy(head(seen.features.clamp_max(tensors["limit"])))


class ReAct(Detector):
    """The energy after features are clipped at a quantile of the training features (Sun, Guo and Li 2021).

    The quantile is that of all features together, of at most 50,000 training examples, evenly spaced.

    Parameters
    ----------
    model, likelihood, features, parameters, batch_fn, output_fn, prior_precision
        As for :class:`ViM`.
    quantile : float
        The share of the training features that are not clipped.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [9.0, 0.0]])
    >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    >>> nb.detectors.ReAct(model, quantile=0.5).fit(x[:2], torch.tensor([0, 1])).ood_score(x)
    tensor([-1.3133, -1.3133, -1.3133])
    """

    _method = _Clipped()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        quantile: float = 0.9,
        features: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Clipped(features, quantile)


@dataclass(frozen=True)
class _Scaled(FeatureScore):
    percentile: float = 0.85

    needs_head = True
    needs_data = False
    own_score = "scale"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("percentile", self.percentile, zero=True)

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        return {}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        assert head is not None
        width, positive = seen.features.shape[1], seen.features.clamp_min(0.0)
        kept = max(1, width - round(self.percentile * width))
        largest = positive.topk(kept, dim=1).values.sum(1).clamp_min(torch.finfo(positive.dtype).tiny)
        return energy(head(seen.features * (positive.sum(1) / largest).exp()[:, None]))


class SCALE(Detector):
    r"""The energy after features are scaled by how concentrated they are (Xu, Chen, Franchi and Yao 2024).

    The factor is :math:`\exp(Q / Q_p)`, the sum of all features over the sum of the largest ones. The paper assumes
    features that are not negative, as after a ReLU; negative ones do not count in the sums. Nothing is learned.

    Parameters
    ----------
    model, likelihood, features, parameters, batch_fn, output_fn, prior_precision
        As for :class:`ViM`.
    percentile : float
        The share of the features of an input that are not among the largest.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 2), torch.tensor([[2.0, 0.0], [2.0, 2.0]])
    >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    >>> nb.detectors.SCALE(model, percentile=0.5).fit(x, torch.tensor([0, 1])).ood_score(x)
    tensor([ -5.4409, -15.4713])
    """

    _method = _Scaled()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        percentile: float = 0.85,
        features: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Scaled(features, percentile)


@dataclass(frozen=True)
class _BoundaryDistance(FeatureScore):
    needs_head = True
    layout = {"mean": "d", "lengths": "cc"}  # noqa: RUF012 - a constant
    own_score = "fdbd"

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        assert head is not None
        mean = training.features.mean(0, dtype=torch.float64).to(training.features.dtype)
        lengths = torch.stack([(head.weight - row).norm(dim=1) for row in head.weight])  # cdist may lose digits
        return {"mean": mean, "lengths": lengths}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        top, tiny = seen.outputs.argmax(1), torch.finfo(seen.outputs.dtype).tiny
        gaps = seen.outputs.amax(1, keepdim=True) - seen.outputs  # (n, C)
        lengths = tensors["lengths"][top]
        there = lengths > 0  # neither the class itself, nor a class with the same weights, has a boundary
        distances = torch.where(there, gaps / lengths.clamp_min(tiny), 0.0).sum(1) / there.sum(1).clamp_min(1)
        from_mean: Tensor = (seen.features - tensors["mean"]).norm(dim=1)
        return -distances / from_mean.clamp_min(tiny)


class FDBD(Detector):
    r"""Minus the mean distance to the decision boundaries, relative to that from the mean feature (Liu and Qin 2024).

    The distance of features to the boundary between the predicted class p and another class c is
    :math:`(z_p - z_c) / \|w_p - w_c\|`.

    Parameters
    ----------
    model, likelihood, features, parameters, batch_fn, output_fn, prior_precision
        As for :class:`ViM`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 2), torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    >>> nb.detectors.FDBD(model).fit(x[:2], torch.tensor([0, 1])).ood_score(x).round(decimals=4)
    tensor([-1., -1., -0.])
    """

    _method = _BoundaryDistance()
