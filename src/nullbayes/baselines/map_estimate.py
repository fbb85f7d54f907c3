"""MAP: the network as it is, with the scores that need no posterior."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline, Work
from nullbayes.errors import LikelihoodError, SettingsError
from nullbayes.likelihoods import Classification
from nullbayes.predictive import LINKS, PRED_TYPES, Mask, Masks, Prediction, joined, pooled, stream

_KINDS = ("max_softmax", "max_logit", "entropy")


class MAP(Baseline):
    """The trained network, without any variance.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    """

    _hessian = _has_prior = False
    _least_samples = _fewest = 1

    def _learn(self, work: Work) -> tuple[int | None, str]:
        self._directions = torch.zeros_like(self._network.theta)[None]
        return None, "the network itself, one sample"

    def predict(
        self,
        x: Any,
        *,
        pred_type: str = "linearized",
        n_samples: int | None = None,
        link_approx: str | None = None,
        mask: Mask = None,
    ) -> Prediction:
        """Predict as the network does; see :meth:`SamplePosterior.predict`."""
        self._network.check_unchanged()
        self._deviations(n_samples)  # says what to do before fit
        if pred_type not in PRED_TYPES:
            msg = f"pred_type must be one of {', '.join(PRED_TYPES)}, not {pred_type!r}."
            raise SettingsError(msg)
        if link_approx is not None and link_approx not in LINKS:
            msg = f"link_approx must be one of {', '.join(LINKS)}, not {link_approx!r}."
            raise SettingsError(msg)
        parts, masks, likelihood = [], Masks(self._likelihood, mask), self._likelihood
        for piece in stream(x, self._network, self._batch_fn, 1):
            parts.append(self._network.outputs(piece))
            masks.look(piece, parts[-1])
        outputs = joined(parts)
        probs = likelihood.probabilities(outputs) if likelihood.has_probabilities else None
        noise = likelihood.noise_variance(outputs)
        return Prediction(
            outputs, torch.zeros_like(outputs), probs, outputs[None], noise, masks.joined(outputs), likelihood.name
        )

    __call__ = predict

    def ood_score(
        self,
        x: Any,
        kind: str = "max_softmax",
        *,
        per: str = "input",
        mask: Mask = None,
        pred_type: str = "linearized",
    ) -> Tensor:  # (N,) or (N, ...)
        """Return one number an input: higher is stranger.

        ``kind`` is "max_softmax" (one minus the largest probability; for several labels or positions, the mean doubt
        about each), "max_logit" (minus the largest logit) or "entropy"; the rest as for other posteriors.
        """
        if kind not in _KINDS:
            msg = f"kind must be one of {', '.join(_KINDS)} for a network without variance, not {kind!r}."
            raise SettingsError(msg)
        prediction = self.predict(x, pred_type=pred_type, mask=mask)
        if prediction.probs is None:
            msg = f"kind={kind!r} needs logits, which a {self._likelihood.name} likelihood has not: MAP has no score."
            raise LikelihoodError(msg)
        if kind == "entropy":
            return self._scored(prediction, kind, per, mask)
        likelihood = self._likelihood
        if kind == "max_logit":
            top = likelihood.at_positions(prediction.mean, largest=True)
            if top.ndim > 1 and per == "input":
                return -pooled(top, prediction.mask, "max")
            return pooled(-top, prediction.mask, kind, per)
        probs = prediction.probs
        if isinstance(likelihood, Classification):
            doubt = 1.0 - likelihood.at_positions(probs, largest=True)
        else:
            doubt = torch.minimum(probs, 1.0 - probs)
            doubt = doubt.mean(1) if doubt.ndim == 2 else doubt
        return pooled(doubt, prediction.mask, "mean", per)

    def _evaluate(self, loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        outputs, targets = [], []
        for x, y in self._pieces(loader):
            outputs.append(self._network.outputs(x))
            self._likelihood.check(outputs[-1], y)
            targets.append(y)
        own = joined(outputs)
        return own, torch.zeros_like(own).expand(2, *own.shape), torch.cat(targets)
