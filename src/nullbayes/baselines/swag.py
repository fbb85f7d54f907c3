r"""SWAG, a Gaussian from the iterates of SGD (Maddox, Garipov, Izmailov, Vetrov and Wilson 2019).

The iterates :math:`\theta_1, \theta_2, \ldots` at the end of training give their mean, the variance of each parameter,
and the last :math:`K` deviations :math:`D` from the running mean. A sample is
:math:`\bar\theta + \tfrac1{\sqrt2}\,\sigma z_1 + \tfrac1{\sqrt{2(K-1)}}\,D z_2`. In networks with batch
normalization, every sample gets new running statistics from a pass over the training data.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.members import Members, States, stacked
from nullbayes.baselines.method import FitContext, FitOptions, Learned
from nullbayes.errors import ModelError, NotFittedError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network, arguments
from nullbayes.posteriors.arguments import normal

_BATCH = 128  # examples that batch statistics are computed from
Train = Callable[[nn.Module], Any] | Iterable[Mapping[str, Tensor]]


class Moments:
    """Mean, mean of squares and last deviations of vectors that come one by one.

    Parameters
    ----------
    rank : int
        How many deviations to keep.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.n = rank, 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64, device="cpu")
        self.deviations: list[Tensor] = []

    def add(self, vector: Tensor) -> None:  # (P,)
        """Add a vector; its deviation is from the mean of all vectors so far, itself included."""
        wide = vector.double()
        self.mean = (self.n * self.mean.to(wide) + wide) / (self.n + 1)
        self.squares = (self.n * self.squares.to(wide) + wide.square()) / (self.n + 1)
        self.n += 1
        self.deviations = [*self.deviations, wide - self.mean][-self.rank :]

    @property
    def variance(self) -> Tensor:
        """The variance of each entry."""
        return (self.squares - self.mean.square()).clamp_min(0.0)

    def sample(self, drawn: Tensor) -> Tensor:  # (P + K,) -> (P,)
        """Turn standard normal noise into a sample."""
        k = len(self.deviations)
        found = drawn[:-k].double() * (self.variance / 2).sqrt()
        for weight, deviation in zip(drawn[-k:].tolist(), self.deviations, strict=True):
            found.add_(deviation, alpha=weight / math.sqrt(2 * (k - 1)))
        return found.add_(self.mean)


@dataclass(frozen=True)
class _Iterates(Members):
    needs = "call fit(loader, train=one_epoch), or train=[state dictionaries]."


class SWAG(Baseline):
    """A Gaussian around the mean of SGD's iterates, with a diagonal and a low-rank part.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    Iterates that were kept during training, as state dictionaries:

    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> iterates = [{"weight": torch.tensor([[1.0, w]])} for w in (-1.0, 0.0, 1.0)]
    >>> posterior = nb.baselines.SWAG(model, "regression").fit(x, torch.zeros(2, 1), train=iterates)
    >>> posterior.moments.mean, posterior.moments.variance
    (tensor([1., 0.], dtype=torch.float64), tensor([0.0000, 0.6667], dtype=torch.float64))
    """

    _method = _Iterates()

    def fit(
        self,
        loader: Any,
        targets: Any = None,
        n_samples: int = 30,
        *,
        train: Train | None = None,
        n_models: int = 20,
        rank: int = 20,
        **options: Unpack[FitOptions],
    ) -> Self:
        """Collect iterates and draw samples.

        Parameters
        ----------
        loader, targets, n_samples, generator, memory_limit, progress
            See :meth:`Baseline.fit`; the data also give each sample its batch statistics.
        train : callable (model) -> None, or iterable of state dictionaries
            Trains the model that it is given for one more epoch, in place: a copy of the trained model, in training
            mode, the same object each time. The paper takes SGD with a constant rate of 1e-2 and momentum 0.9. Or the
            iterates themselves.
        n_models : int
            The number of epochs; the paper takes 20.
        rank : int
            How many of the last deviations to keep.

        Returns
        -------
        SWAG
            The posterior itself.
        """
        if rank < 2 or n_models < 2:
            msg = f"rank and n_models must be at least 2 to speak of a covariance, not {rank} and {n_models}."
            raise SettingsError(msg)
        learn = self._method.fit if train is None else functools.partial(_collect, train, n_models, rank)
        return self._fit(learn, loader, targets, n_samples, **options)

    @property
    def moments(self) -> Moments:
        """The moments of the iterates, which a file does not hold."""
        moments = None if self._fitted is None else self._fitted.state.source
        if moments is None:
            msg = "There are no moments of iterates: they belong to a fit, and no file holds them."
            raise NotFittedError(msg)
        found: Moments = moments
        return found


def _collect(train: Train, n_models: int, rank: int, context: FitContext) -> Learned[States]:
    network, moments = context.network, Moments(rank)
    for state in _iterates(train, n_models, network):
        moments.add(_vector(state, network))
    if moments.n < 2:
        msg = f"SWAG needs at least 2 iterates to speak of a covariance; train=... gave {moments.n}."
        raise SettingsError(msg)
    kept = len(moments.deviations)
    drawn = normal(network, context.seed, 0, context.n_samples, network.n_parameters + kept)
    states = [  # one at a time: in float64, all of them are several times as large as what a fit keeps
        _with_statistics(moments.sample(one.to(network.device)).to(network.dtype), network, context.rows.examples)
        for one in drawn
    ]
    return Learned(stacked(network, states, moments), kept, f"{moments.n} iterates")


def _iterates(train: Train, n_models: int, network: Network) -> Iterable[Mapping[str, Tensor]]:
    if not callable(train):
        yield from train
        return
    model = copy.deepcopy(network.model).train()
    for _ in range(n_models):
        train(model)
        yield model.state_dict()


def _vector(state: Mapping[str, Tensor], network: Network) -> Tensor:  # (P,)
    """Return the parameters of an iterate; those that do not vary must be those of the model."""
    own = dict(network.model.named_parameters())
    for name in own.keys() - set(network.names):
        if name not in state or not torch.equal(state[name].to(own[name].device), own[name]):
            msg = (
                f"{name!r} moved in training, but is not among parameters=...: "
                "let it vary, or set requires_grad_(False) on it before training."
            )
            raise ModelError(msg)
    wanted = {name: state[name].detach()[None].to(network.device) for name in own if name in state}
    return network.flatten(wanted)[0]


def _with_statistics(flat: Tensor, network: Network, examples: Examples) -> dict[str, Tensor]:
    """Return the state of a sample, with running statistics from a pass over the training data in even batches."""
    module = copy.deepcopy(network.model).eval()
    module.load_state_dict({**module.state_dict(), **network.unflatten(flat)})
    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if layers:
        for layer in layers:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
        n = len(examples)
        n_batches = math.ceil(n / _BATCH)
        for start, stop in examples.ranges(math.ceil(n / n_batches)):
            args, kwargs = arguments(examples.read(start, stop)[0])
            with torch.no_grad():
                module(*args, **kwargs)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
