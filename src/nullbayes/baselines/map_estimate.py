"""MAP: the network as it is, with the scores that need no posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.method import FitContext, Learned, Method, Question
from nullbayes.errors import LikelihoodError, SettingsError
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Classification, Likelihood
from nullbayes.predictive import LINKS, PRED_TYPES, Masks, Prediction, joined, pooled, stream


@dataclass(frozen=True)
class _Network(Method[tuple[()]]):
    hessian = has_prior = False
    scores = ("max_softmax", "max_logit", "entropy")

    def fit(self, context: FitContext) -> Learned[tuple[()]]:
        return Learned((), None, "the network itself, one sample")

    def deviations(self, state: tuple[()], network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        return torch.zeros_like(network.theta)[None]

    def predict(self, state: tuple[()], question: Question) -> Prediction:
        if question.pred_type not in PRED_TYPES:
            msg = f"pred_type must be one of {', '.join(PRED_TYPES)}, not {question.pred_type!r}."
            raise SettingsError(msg)
        if question.link is not None and question.link not in LINKS:
            msg = f"link_approx must be one of {', '.join(LINKS)}, not {question.link!r}."
            raise SettingsError(msg)
        likelihood, parts, masks = question.likelihood, [], Masks(question.likelihood, question.mask)
        for piece in stream(question.x, question.network, question.batch_fn, 1):
            parts.append(question.network.outputs(piece))
            masks.look(piece, parts[-1])
        outputs = joined(parts)
        return Prediction(
            outputs,
            torch.zeros_like(outputs),
            likelihood.probabilities(outputs) if likelihood.has_probabilities else None,
            outputs[None],
            likelihood.noise_variance(outputs),
            masks.joined(outputs),
            likelihood.name,
        )

    def score(self, prediction: Prediction, likelihood: Likelihood, kind: str, per: str) -> Tensor | None:
        probs = prediction.probs
        if probs is None:
            msg = f"kind={kind!r} needs logits, which a {likelihood.name} likelihood has not: MAP has no score."
            raise LikelihoodError(msg)
        if kind == "entropy":
            return None
        if kind == "max_logit":
            top = likelihood.at_positions(prediction.mean, largest=True)
            if top.ndim > 1 and per == "input":
                return -pooled(top, prediction.mask, "max")
            return pooled(-top, prediction.mask, kind, per)
        if isinstance(likelihood, Classification):
            doubt = 1.0 - likelihood.at_positions(probs, largest=True)
        else:
            doubt = torch.minimum(probs, 1.0 - probs)
            doubt = doubt.mean(1) if doubt.ndim == 2 else doubt
        return pooled(doubt, prediction.mask, "mean", per)


class MAP(Baseline):
    """The trained network, without any variance.

    The scores are "max_softmax" (one minus the largest probability; for several labels or positions, the mean over
    them), "max_logit" (minus the largest logit) and "entropy".

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, batch_fn, output_fn : optional
        Which parameters vary, by name (all by default); functions that read batches and outputs. See
        :class:`Baseline <nullbayes.baselines.Baseline>` for details.
    prior_precision : float
        Leave it out: there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    >>> nb.baselines.MAP(model).fit(x, torch.tensor([0, 1])).ood_score(x, "max_softmax")
    tensor([0.0025, 0.5000])
    """

    _method = _Network()
    _fewest = 1
