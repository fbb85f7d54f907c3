r"""Likelihoods: a loss for each example, its curvature in output space, and what outputs mean as probabilities.

Outputs come as the model gives them: (n, O), or with more dimensions, such as (n, C, H, W) for an image of classes or
(n, T, C) for a sequence of them. A likelihood that does not fit the outputs or the targets is refused.

A name stands for a likelihood with its defaults: "classification" for ``Classification(class_dim, ignore_index)``,
"regression" for ``Regression(sigma_noise)``, "binary" and "multilabel" for ``Bernoulli``. A callable
``(outputs, targets) -> losses``, one loss an example, is one as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods.base import Likelihood as Likelihood
from nullbayes.likelihoods.base import LossFn as LossFn
from nullbayes.likelihoods.classification import Classification as Classification
from nullbayes.likelihoods.custom import CustomLoss as CustomLoss
from nullbayes.likelihoods.independent import Bernoulli as Bernoulli
from nullbayes.likelihoods.independent import Regression as Regression


def resolve(likelihood: str | Likelihood | LossFn, **settings: Any) -> Likelihood:
    """Return the likelihood that a name (with its settings), a likelihood or a per-example loss stands for."""
    named: dict[str, Callable[..., Likelihood]] = {
        "classification": Classification,
        "binary": partial(Bernoulli, "binary"),
        "multilabel": partial(Bernoulli, "multilabel"),
        "regression": Regression,
    }
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str):
        if likelihood not in named:
            msg = (
                f"likelihood={likelihood!r} is not one of {', '.join(named)}, "
                "nor a callable (outputs, targets) -> losses."
            )
            raise LikelihoodError(msg)
        return named[likelihood](**settings)
    if callable(likelihood):
        return CustomLoss(likelihood)
    msg = f"likelihood must be a name, a Likelihood or a callable, not {type(likelihood).__name__}."
    raise LikelihoodError(msg)
