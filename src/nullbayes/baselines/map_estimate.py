"""MAP: the network as it is, with the scores that need no posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.method import FitContext, Learned, Method, Question
from nullbayes.errors import SettingsError
from nullbayes.jacobian.network import Network
from nullbayes.predictive import LINKS, OF_MEAN, PRED_TYPES, Masks, Prediction, joined, stream


@dataclass(frozen=True)
class NetworkItself(Method[Any]):
    """The network as it is: one sample without a variance. Detectors derive from it."""

    hessian = has_prior = False
    fewest = 1
    of_predictions = OF_MEAN

    def fit(self, context: FitContext) -> Learned[Any]:
        """Learn nothing."""
        return Learned((), None, "the network itself, one sample")

    def deviations(self, state: Any, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        """Return one sample at the trained parameters."""
        return torch.zeros_like(network.theta)[None]

    def predict(self, state: Any, question: Question) -> Prediction:
        """Return the outputs of the network."""
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


class MAP(Baseline):
    """The trained network, without any variance.

    The scores are those of its outputs alone: "max_probability", "max_logit", "energy", "generalized_entropy" and
    "entropy".

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x = torch.tensor([[3.0, -3.0], [0.0, 0.0]])
    >>> nb.baselines.MAP(model).fit(x, torch.tensor([0, 1])).ood_score(x)
    tensor([0.0025, 0.5000])
    """

    _method = NetworkItself()
