r"""SWAG, a Gaussian from the iterates of SGD (Maddox, Garipov, Izmailov, Vetrov and Wilson 2019).

From iterates :math:`\theta_1, \theta_2, \ldots` at the end of training: their mean, their variance by parameter, and
the last :math:`K` deviations :math:`D` from the running mean. A sample is
:math:`\bar\theta + \tfrac1{\sqrt2}\,\sigma z_1 + \tfrac1{\sqrt{2(K-1)}}\,D z_2`. Networks with batch normalization get
new running statistics for every sample, from a pass over the training data.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Work
from nullbayes.baselines.members import Members
from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import arguments
from nullbayes.posteriors.arguments import data_and_count, normal

_BATCH = 128  # examples that batch statistics are taken of
Train = Callable[[nn.Module], Any] | Iterable[Mapping[str, Tensor]]


class Moments:
    """Mean, mean of squares and last deviations of vectors that come one by one.

    Parameters
    ----------
    rank : int
        How many deviations to hold.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.n = rank, 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64, device="cpu")
        self.deviations: list[Tensor] = []

    def add(self, vector: Tensor) -> None:  # (P,)
        """Take up one more; deviations are from the mean so far, itself included."""
        wide = vector.double()
        self.mean = (self.n * self.mean.to(wide) + wide) / (self.n + 1)
        self.squares = (self.n * self.squares.to(wide) + wide.square()) / (self.n + 1)
        self.n += 1
        self.deviations = [*self.deviations, wide - self.mean][-self.rank :]

    @property
    def variance(self) -> Tensor:
        """The variance of each entry."""
        return (self.squares - self.mean.square()).clamp_min(0.0)

    def sample(self, drawn: Tensor) -> Tensor:  # (S, P + K) -> (S, P)
        """Turn standard normal noise into samples."""
        k = len(self.deviations)
        own, shared = drawn[:, :-k].double(), drawn[:, -k:].double()
        along = shared @ torch.stack(self.deviations) / math.sqrt(2 * (k - 1))
        return self.mean + own * self.variance.sqrt() / math.sqrt(2) + along


class SWAG(Members):
    """A Gaussian around the mean of SGD's iterates, with a diagonal and a low-rank part.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn
        See :class:`SamplePosterior <nullbayes.posteriors.base.SamplePosterior>`.
    """

    _needs = "call fit(loader, train=one_epoch), or train=[state dictionaries]."

    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        train: Train | None = None,
        n_models: int = 20,
        rank: int = 20,
        generator: torch.Generator | None = None,
        memory_limit: int | str | None = None,
        progress: bool = True,
    ) -> Self:
        """Collect iterates and draw samples.

        Parameters
        ----------
        loader, targets, n_samples, generator, memory_limit, progress
            See :meth:`Baseline.fit`; the data also give each sample its batch statistics.
        train : callable (model) -> None, or iterable of state dictionaries
            Trains the model that it is given for one more epoch, in place: a copy of the trained one, in training mode,
            the same object each time; the paper takes SGD with a constant rate of 1e-2 and momentum 0.9. Or the
            iterates themselves.
        n_models : int
            How many epochs; the paper takes 20.
        rank : int
            How many of the last deviations to hold.
        """
        if rank < 2 or n_models < 2:
            msg = f"rank and n_models must be at least 2 to speak of a covariance, not {rank} and {n_models}."
            raise SettingsError(msg)
        learn = self._learn if train is None else functools.partial(self._collect, train, n_models, rank)
        return self._fit(*data_and_count(loader, targets, n_samples), generator, memory_limit, learn, progress=progress)

    def _collect(self, train: Train, n_models: int, rank: int, work: Work) -> tuple[int | None, str]:
        self.moments = moments = Moments(rank)
        with work.meter.phase("training"):
            for state in self._iterates(train, n_models):
                moments.add(self._vector(state))
        if moments.n < 2:
            msg = f"SWAG needs at least 2 iterates to speak of a covariance; train=... gave {moments.n}."
            raise SettingsError(msg)
        with work.meter.phase("samples"):
            size = self._network.n_parameters + len(moments.deviations)
            drawn = normal(self._network, self._seed, 0, work.n_samples, size).to(self._network.device)
            flat = moments.sample(drawn).to(self._network.dtype)
            self._take_members([self._with_statistics(vector, work) for vector in flat])
        return len(moments.deviations), f"{moments.n} iterates"

    def _iterates(self, train: Train, n_models: int) -> Iterable[Mapping[str, Tensor]]:
        if not callable(train):
            yield from train
            return
        model = copy.deepcopy(self._network.model).train()
        for _ in range(n_models):
            train(model)
            yield model.state_dict()

    def _vector(self, state: Mapping[str, Tensor]) -> Tensor:  # (P,)
        """Return the parameters of an iterate; those that do not vary must be those of the model."""
        own = dict(self._network.model.named_parameters())
        for name in own.keys() - set(self._network.names):
            if name not in state or not torch.equal(state[name].to(own[name].device), own[name]):
                msg = (
                    f"{name!r} moved in training, but is not among parameters=...: "
                    "let it vary, or set requires_grad_(False) on it before training."
                )
                raise ModelError(msg)
        wanted = {name: state[name].detach()[None].to(self._network.device) for name in own if name in state}
        return self._network.flatten(wanted)[0]

    def _with_statistics(self, flat: Tensor, work: Work) -> dict[str, Tensor]:
        """Return the state of a sample, with running statistics from a pass over the training data."""
        module = copy.deepcopy(self._network.model).eval()
        state = {**module.state_dict(), **self._network.unflatten(flat)}
        module.load_state_dict(state)
        layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if layers:
            for layer in layers:
                layer.train()
                layer.reset_running_stats()
                layer.momentum = None  # the mean over all batches
            _pass_over(module, work.examples)
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _pass_over(module: nn.Module, examples: Examples) -> None:
    """Let a network see all examples, in even batches; layers that are in training mode learn from them."""
    n = len(examples)
    for start, stop in examples.ranges(-(-n // -(-n // _BATCH))):
        args, kwargs = arguments(examples.read(start, stop)[0])
        with torch.no_grad():
            module(*args, **kwargs)
