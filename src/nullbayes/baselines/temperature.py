"""Temperature scaling: the network with the temperature that suits held-out data best (Guo et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.map_estimate import NetworkItself
from nullbayes.baselines.method import FitContext, FitOptions, Learned
from nullbayes.errors import LikelihoodError
from nullbayes.posteriors.best_precision import answers_on
from nullbayes.posteriors.scale import tuned
from nullbayes.precision import full_precision
from nullbayes.predictive import joined

_AT_ONCE = 1024  # examples


@dataclass(frozen=True)
class _BestTemperature(NetworkItself):
    @full_precision()
    def fit(self, context: FitContext) -> Learned[float]:
        """Find the temperature of the largest likelihood."""
        likelihood = context.rows.likelihood
        if not likelihood.has_closed_form:
            what = "a loss of your own" if likelihood.name == "custom" else f"a {likelihood.name} likelihood"
            msg = f"{context.name} needs a likelihood with a temperature, which {what} has not: use MAP."
            raise LikelihoodError(msg)
        outputs: list[Tensor] = []
        targets: list[Tensor] = []
        for start, stop in context.rows.examples.ranges(_AT_ONCE):
            x, y = context.rows.examples.read(start, stop)
            outputs.append(context.network.outputs(x))
            targets.append(y)
        whole = joined(outputs)
        without_variance = torch.zeros_like(whole)[None].expand(2, *whole.shape)
        _, best = tuned(answers_on(likelihood, whole, without_variance, torch.cat(targets)))
        return Learned(best, None, f"the network itself at a temperature of {best:.4g}")


class TemperatureScaling(Baseline):
    """The trained network, whose temperature is chosen by the likelihood of held-out data (Guo et al. 2017).

    Logits are divided by the temperature, so the predicted classes are those of the network; for a regression, the
    variance of the noise is multiplied by it. Scores are those of :class:`MAP <nullbayes.baselines.MAP>`, of which
    "max_probability" and "entropy" follow the temperature.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    Logits of ±2 claim 98 % where three of four predictions are right, which is the probability at logits of ±0.55:

    >>> import torch
    >>> import nullbayes as nb
    >>> model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2)})
    >>> x, y = torch.tensor([[2.0, -2.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> scaled = nb.baselines.TemperatureScaling(model).fit(x, y)
    >>> round(scaled.temperature, 1), scaled.predict(x[:1]).probs.round(decimals=2)
    (3.6, tensor([[0.7500, 0.2500]]))
    """

    _method = _BestTemperature()

    def fit(self, loader: Any, targets: Any = None, n_samples: int = 30, **options: Unpack[FitOptions]) -> Self:
        """Choose the temperature.

        Parameters
        ----------
        loader, targets : iterable of batches, or inputs and targets
            Data that the network was not trained on, unshuffled; a thousand examples are plenty.
        n_samples : int
            Means nothing here: there is one sample, the network.
        generator, memory_limit, progress
            See :meth:`Baseline.fit`.

        Returns
        -------
        TemperatureScaling
            The posterior itself, with another ``temperature``.
        """
        self._fit(self._method.fit, loader, targets, n_samples, **options)
        self.temperature = self._need_fit().state
        return self
