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
                "nor a callable (outputs, targets) -> losses."
            )
            raise LikelihoodError(msg)
        return _NAMED[likelihood](**settings)
    if callable(likelihood):
        return CustomLoss(likelihood)
    msg = f"likelihood must be a name, a Likelihood or a callable, not {type(likelihood).__name__}."
    raise LikelihoodError(msg)
