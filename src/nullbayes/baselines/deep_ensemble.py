"""Deep ensembles (Lakshminarayanan, Pritzel and Blundell 2017): networks trained from different starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from nullbayes.baselines.base import Work
from nullbayes.baselines.members import Members
from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import to_device
from nullbayes.jacobian.modules import unwrapped
from nullbayes.posteriors.arguments import data_and_count


class DeepEnsemble(Members):
    """As many trained networks as one can afford; each prediction is the mean of theirs.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`. The model says what structure the
        members have, and what ``check_fit`` compares with; it is no member itself.
    """

    _needs = "call fit(loader, n_samples, train=lambda seed: a trained network)."

    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        train: Callable[[int], nn.Module] | None = None,
        generator: torch.Generator | None = None,
        memory_limit: int | str | None = None,
        progress: bool = True,
    ) -> Self:
        """Train the members.

        Parameters
        ----------
        loader, targets, n_samples, generator, memory_limit, progress
            See :meth:`Baseline.fit`; the data are checked against the likelihood, ``train`` brings its own.
        train : callable (seed) -> nn.Module
            Returns a network of the model's structure, newly trained with that seed.
        """
        learn = self._learn if train is None else functools.partial(self._train, train)
        return self._fit(*data_and_count(loader, targets, n_samples), generator, memory_limit, learn, progress=progress)

    def _train(self, train: Callable[[int], nn.Module], work: Work) -> tuple[int | None, str]:
        states = []
        with work.meter.phase("training"):
            for i in range(work.n_samples):
                member = train((self._seed + i) % 2**32)
                if not isinstance(member, nn.Module):
                    msg = f"train(seed) must return a trained nn.Module, not {type(member).__name__}."
                    raise ModelError(msg)
                states.append(to_device(dict(unwrapped(member).state_dict()), self._network.device))
        self._take_members(states)
        return None, "networks trained from different starts"
