r"""Likelihoods: the loss per example, its Hessian in the outputs, and the probabilities of the outputs.

Outputs have the shape that the model returns: (n, O), or more dimensions, such as (n, C, H, W) for images of classes
and (n, T, C) for sequences of classes. A likelihood refuses outputs and targets that do not fit it.

==================  ====================================================================================
"classification"    `Classification`: one class per example or per position
"binary"            `Bernoulli` with one logit per example
"multilabel"        `Bernoulli` with several independent logits
"regression"        `Regression`: Gaussian noise, whose standard deviation is estimated by default
a callable          `CustomLoss`: ``(outputs, targets) -> losses``, one loss per example
==================  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods.base import CustomLoss as CustomLoss
from nullbayes.likelihoods.base import Likelihood as Likelihood
from nullbayes.likelihoods.base import LossFn as LossFn
from nullbayes.likelihoods.classification import Classification as Classification
from nullbayes.likelihoods.independent import Bernoulli as Bernoulli
from nullbayes.likelihoods.independent import Regression as Regression

_NAMED: dict[str, Callable[..., Likelihood]] = {
    "classification": Classification,
    "binary": partial(Bernoulli, "binary"),
    "multilabel": partial(Bernoulli, "multilabel"),
    "regression": Regression,
}
BUILT_IN = tuple(_NAMED)  # what a file holds of these is enough
_LOSSES = {  # of torch, in lower case and without "loss": which likelihood each belongs to
    "crossentropy": 'likelihood="classification"',
    "nll": 'likelihood="classification"',
    "binarycrossentropy": 'likelihood="binary" for one logit, or "multilabel" for several',
    "binarycrossentropywithlogits": 'likelihood="binary" for one logit, or "multilabel" for several',
    "bce": 'likelihood="binary" for one logit, or "multilabel" for several',
    "bcewithlogits": 'likelihood="binary" for one logit, or "multilabel" for several',
    "mse": 'likelihood="regression"',
    "gaussiannll": 'likelihood="regression"',
}


def resolve(likelihood: str | Likelihood | LossFn, **settings: Any) -> Likelihood:
    """Return a likelihood from its name, from a loss, or as it is.

    Parameters
    ----------
    likelihood : str, Likelihood or callable
        A name of the table above, a likelihood, or a loss per example.
    **settings
        Arguments of the likelihood that a name stands for.

    Returns
    -------
    Likelihood
        The likelihood.

    Examples
    --------
    >>> resolve("regression", sigma_noise=0.5).sigma_noise
    0.5
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str):
        if likelihood not in _NAMED:
            msg = (
                f"likelihood={likelihood!r} is not one of {', '.join(_NAMED)}, "
                f"nor a callable (outputs, targets) -> losses.{_meant(likelihood)}"
            )
            raise LikelihoodError(msg)
        return _NAMED[likelihood](**settings)
    if callable(likelihood):
        if (hint := _meant(_name(likelihood))) and not _has_settings(likelihood):
            msg = (
                f"{_name(likelihood)} is a loss without probabilities, which most scores and all label sets need.{hint}"
            )
            raise LikelihoodError(msg)
        return CustomLoss(likelihood)
    msg = f"likelihood must be a name, a Likelihood or a callable, not {type(likelihood).__name__}."
    raise LikelihoodError(msg)


def _name(loss: Any) -> str:
    """Return the name of a loss of torch; empty for a loss of one's own."""
    found = loss if hasattr(loss, "__name__") else type(loss)
    return str(found.__name__) if str(found.__module__).startswith("torch.") else ""


def _meant(name: str) -> str:
    """Return which likelihood somebody means who names a loss; empty where that is not known."""
    known = _LOSSES.get(name.lower().replace("_", "").replace("-", "").replace(" ", "").removesuffix("loss"))
    return "" if known is None else f" Pass {known}."


def _has_settings(loss: Any) -> bool:
    """Return whether a loss of torch is more than the likelihood of that name: class weights, smoothed labels."""
    weights = (getattr(loss, name, None) for name in ("weight", "pos_weight"))
    smoothing, ignored = getattr(loss, "label_smoothing", 0.0), getattr(loss, "ignore_index", -100)
    return any(weight is not None for weight in weights) or smoothing != 0.0 or ignored != -100
