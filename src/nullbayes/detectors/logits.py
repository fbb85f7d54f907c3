"""Detectors that look at the outputs alone: they learn nothing, and work with masks and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.map_estimate import NetworkItself
from nullbayes.baselines.method import FitContext, Learned, LikelihoodLike, Options, check_counts
from nullbayes.detectors.features import check_fraction
from nullbayes.errors import LikelihoodError
from nullbayes.predictive import Mask, Prediction, score, warn_of_padding


@dataclass(frozen=True)
class _OfLogits(NetworkItself):
    def fit(self, context: FitContext) -> Learned[Any]:
        """Learn nothing; refuse outputs that are no logits."""
        if not context.rows.likelihood.has_probabilities:
            msg = (
                f"{context.name} is a score of logits, which outputs of a {context.rows.likelihood.name} likelihood "
                "are not: use nb.detectors.KNN, which looks at features."
            )
            raise LikelihoodError(msg)
        return Learned((), None, "the outputs of the network")


@dataclass(frozen=True)
class _MaxProbability(_OfLogits):
    own_score = "max_probability"


@dataclass(frozen=True)
class _MaxLogit(_OfLogits):
    own_score = "max_logit"


@dataclass(frozen=True)
class _Energy(_OfLogits):
    own_score = "energy"


@dataclass(frozen=True)
class _GeneralizedEntropy(_OfLogits):
    gamma: float = 0.1
    largest: int = 100

    own_score = "generalized_entropy"

    def __post_init__(self) -> None:
        check_fraction("gamma", self.gamma)
        check_counts({"largest": self.largest})


class MSP(Baseline):
    """One minus the largest probability (Hendrycks and Gimpel 2017).

    With several decisions per input (labels, positions) the scores of labels add up, and those of positions are
    averaged.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary" or "multilabel".
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    >>> nb.detectors.MSP(model).fit(x, torch.tensor([0, 1])).ood_score(x)
    tensor([0.0025, 0.5000])
    """

    _method = _MaxProbability()


class MaxLogit(Baseline):
    """Minus the largest logit (Hendrycks, Basart, Mazeika, Zou, Kwon, Mostajabi, Steinhardt and Song 2022).

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn, prior_precision
        As for :class:`MSP`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    >>> nb.detectors.MaxLogit(model).fit(x, torch.tensor([0, 1])).ood_score(x)
    tensor([-3., -0.])
    """

    _method = _MaxLogit()


class Energy(Baseline):
    r"""The free energy :math:`-\log \sum_c e^{z_c}` of the logits (Liu, Wang, Owens and Li 2020).

    The temperature of the paper is 1, which it recommends.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn, prior_precision
        As for :class:`MSP`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    >>> nb.detectors.Energy(model).fit(x, torch.tensor([0, 1])).ood_score(x)
    tensor([-3.0025, -0.6931])
    """

    _method = _Energy()


class GEN(Baseline):
    r"""The generalized entropy :math:`\sum_{c \le M} p_{(c)}^\gamma (1 - p_{(c)})^\gamma` (Liu, Lochman and Zach 2023).

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn, prior_precision
        As for :class:`MSP`.
    gamma : float
        The exponent, between 0 and 1. Small ones make small differences from certainty count.
    largest : int
        How many of the largest probabilities count.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    >>> nb.detectors.GEN(model, gamma=0.5).fit(x, torch.tensor([0, 1])).ood_score(x)
    tensor([0.0993, 1.0000])
    """

    _method = _GeneralizedEntropy()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        gamma: float = 0.1,
        largest: int = 100,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _GeneralizedEntropy(gamma, largest)

    def _scored(self, prediction: Prediction, kind: str, per: str, mask: Mask) -> Tensor:
        if kind != self._method.scores[0]:
            return Baseline._scored(self, prediction, kind, per, mask)
        if mask is None and per == "input":
            warn_of_padding(self._likelihood, prediction)
        return score(prediction, self._likelihood, kind, per, gamma=self._method.gamma, largest=self._method.largest)
