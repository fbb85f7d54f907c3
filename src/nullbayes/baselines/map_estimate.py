"""MAP: the network as it is, with the scores that need no posterior."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline, Work
from nullbayes.errors import LikelihoodError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.likelihoods import Classification
from nullbayes.predictive import LINKS, PRED_TYPES, Prediction, score, stream

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
        self, x: Any, *, pred_type: str = "linearized", n_samples: int | None = None, link_approx: str | None = None
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
        parts = [self._network.outputs(piece) for piece in stream(x, self._network, self._batch_fn, 1)]
        outputs = torch.cat(parts)
        probs = self._likelihood.probabilities(outputs) if self._likelihood.has_probabilities else None
        return Prediction(outputs, torch.zeros_like(outputs), probs, outputs[None])

    __call__ = predict

    def ood_score(self, x: Any, kind: str = "max_softmax", *, pred_type: str = "linearized") -> Tensor:  # (N,)
        """Return one number an input: higher is stranger.

        ``kind`` is "max_softmax" (one minus the largest probability; for several labels or positions, the mean doubt
        about each), "max_logit" (minus the largest logit) or "entropy".
        """
        if kind not in _KINDS:
            msg = f"kind must be one of {', '.join(_KINDS)} for a network without variance, not {kind!r}."
            raise SettingsError(msg)
        prediction = self.predict(x, pred_type=pred_type)
        if prediction.probs is None:
            msg = f"kind={kind!r} needs logits, which a {self._likelihood.name} likelihood has not: MAP has no score."
            raise LikelihoodError(msg)
        if kind == "entropy":
            return score(prediction, self._likelihood, kind)
        if kind == "max_logit":
            return -prediction.mean.flatten(1).amax(1)
        probs = prediction.probs
        if isinstance(self._likelihood, Classification):
            doubt = 1.0 - probs.amax(-1 if self._likelihood.class_dim is None else self._likelihood.class_dim)
        else:
            doubt = torch.minimum(probs, 1.0 - probs)
        return doubt.reshape(len(doubt), -1).mean(1)

    def _evaluate(self, loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        examples = Examples(loader, self._batch_fn, self._network.device)
        x, y = examples.read(0, len(examples))
        outputs = self.predict(x).mean
        self._likelihood.check(outputs, y)
        return outputs, torch.zeros_like(outputs).expand(2, *outputs.shape), y
