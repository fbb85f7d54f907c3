"""Detectors that compare features with those of the nearest training examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nullbayes.baselines.method import LikelihoodLike, Options, check_counts
from nullbayes.detectors.features import Detector, FeatureScore, Tensors, Training, energy
from nullbayes.jacobian.features import Head, Seen

_MOST = 50_000  # training examples to compare with
_ROWS = 1024  # inputs whose similarities with all of them are in memory at a time


@dataclass(frozen=True)
class _Nearest(FeatureScore):
    k: int = 10

    needs_classes = False
    most = _MOST
    layout = {"bank": "nd"}  # noqa: RUF012 - a constant
    own_score = "knn"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts({"k": self.k})

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        return {"bank": normalize(training.features)}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        bank, parts = tensors["bank"], []
        for some in normalize(seen.features).split(_ROWS):
            last = (some @ bank.T).topk(min(self.k, len(bank)), dim=1).indices[:, -1]
            parts.append((some - bank[last]).norm(dim=1))  # sqrt(2 - 2 cos) would lose half of the digits near zero
        return torch.cat(parts)


class KNN(Detector):
    """The distance to the k-th nearest training example, features scaled to length one (Sun, Ming, Zhu and Li 2022).

    It needs no classes, and works for every likelihood. Where outputs have positions, the features are the mean over
    them. The features of at most 50,000 training examples are kept, evenly spaced.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel", "regression", or a
        loss of your own.
    k : int
        Which neighbour; the last one, if there are fewer examples.
    features : str, optional
        The name of the layer whose inputs are the features, as in ``model.named_modules()``; the last linear layer or
        convolution by default.
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 3), torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    >>> detector = nb.detectors.KNN(model, k=1).fit(x[:2], torch.tensor([0, 1]))
    >>> detector.ood_score(x)
    tensor([0.0000, 0.0000, 1.4142])
    """

    _method = _Nearest()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        k: int = 10,
        features: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Nearest(features, k)


@dataclass(frozen=True)
class _Guided(FeatureScore):
    k: int = 10

    most = _MOST
    layout = {"bank": "nd"}  # noqa: RUF012 - a constant
    own_score = "nnguide"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts({"k": self.k})

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        return {"bank": normalize(training.features) * -energy(training.outputs)[:, None]}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        bank = tensors["bank"]
        k = min(self.k, len(bank))
        guidance = [(some @ bank.T).topk(k, dim=1).values.mean(1) for some in normalize(seen.features).split(_ROWS)]
        return energy(seen.outputs) * torch.cat(guidance)


class NNGuide(Detector):
    r"""The energy, weighted by the similarity with confident training examples (Park, Jung and Teoh 2023).

    The weight is the mean of the k largest :math:`\cos(f, f_n)\, (-E_n)` over training examples n with energies
    :math:`E_n`. At most 50,000 of them are kept, evenly spaced.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", with outputs (n, C).
    k : int
        The number of neighbours; all of them, if there are fewer examples.
    features, parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`KNN`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, -2.0]])
    >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    >>> nb.detectors.NNGuide(model, k=1).fit(x[:2], torch.tensor([0, 1])).ood_score(x)
    tensor([-4.5238, -4.5238, -3.0352])
    """

    _method = _Guided()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        k: int = 10,
        features: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Guided(features, k)
