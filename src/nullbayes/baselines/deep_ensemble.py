"""Deep ensembles (Lakshminarayanan, Pritzel and Blundell 2017): networks trained from different starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, Unpack

from torch import nn

from nullbayes.baselines.base import Baseline, FitOptions
from nullbayes.baselines.members import Members, States, stacked
from nullbayes.baselines.method import Context, Learned
from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import to_device
from nullbayes.jacobian.modules import unwrapped


class _Trained(Members):
    needs = "call fit(loader, n_samples, train=lambda seed: a trained network)."


class DeepEnsemble(Baseline):
    """As many trained networks as one can afford; each prediction is the mean of theirs.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`. The model says what structure the members have, and
        what ``check_fit`` compares with; it is not a member itself.
    """

    _method = _Trained()

    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        train: Callable[[int], nn.Module] | None = None,
        **options: Unpack[FitOptions],
    ) -> Self:
        """Train the members.

        Parameters
        ----------
        loader, targets, n_samples, generator, memory_limit, progress
            See :meth:`Baseline.fit`; the data are checked against the likelihood, and ``train`` brings its own.
        train : callable (seed) -> nn.Module
            Returns a network of the model's structure, newly trained with that seed.
        """
        learn = self._method.fit if train is None else functools.partial(_train, train)
        return self._fit(learn, loader, targets, n_samples, **options)


def _train(train: Callable[[int], nn.Module], context: Context) -> Learned[States]:
    states = []
    with context.meter.phase("training"):
        for i in range(context.n_samples):
            member = train((context.seed + i) % 2**32)
            if not isinstance(member, nn.Module):
                msg = f"train(seed) must return a trained nn.Module, not {type(member).__name__}."
                raise ModelError(msg)
            states.append(to_device(dict(unwrapped(member).state_dict()), context.network.device))
    return Learned(stacked(context.network, states), None, "networks trained from different starts")
