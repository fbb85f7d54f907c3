"""Methods whose samples are whole networks, with their own parameters and running statistics; deep ensembles."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.method import FitContext, FitOptions, Learned, Method, Question
from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.batches import n_examples, to_device
from nullbayes.jacobian.modules import unwrapped
from nullbayes.jacobian.network import Network
from nullbayes.predictive import Masks, Prediction, default_link, joined, stream, summarize

_PREFIX = "member."


@dataclass(frozen=True)
class States:
    """The state dictionaries of all members, stacked by name: (S, ...) each; and what they were made from."""

    tensors: Mapping[str, Tensor]
    source: Any = None


class Members(Method[States]):
    """Networks of the model's structure, each with its own parameters and buffers.

    Predictions are the outputs of the members themselves: there is nothing to linearize.
    """

    hessian = has_prior = False
    pred_type = "sampled"
    needs: ClassVar[str]  # what fit must be given, as a sentence

    def fit(self, context: FitContext) -> Learned[States]:
        """Refuse: members come from training, which only the caller can do."""
        msg = f"{context.name} learns from networks in training: {self.needs}"
        raise SettingsError(msg)

    def deviations(self, state: States, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        """Return the parameters of the members relative to those of the network."""
        return network.flatten(state.tensors) - network.theta

    def predict(self, state: States, question: Question) -> Prediction:
        """Predict with every member."""
        network, likelihood = question.network, question.likelihood
        if question.pred_type != "sampled":
            msg = f'pred_type must be "sampled", not {question.pred_type!r}: members answer with their own outputs.'
            raise SettingsError(msg)
        used = len(question.directions)
        pieces = list(stream(question.x, network, question.batch_fn, used))
        masks, outputs = Masks(likelihood, question.mask), []
        for i in range(used):
            member = _member(network, state, i)
            outputs.append(joined([member.outputs(piece) for piece in pieces]))
        samples = torch.stack(outputs)
        network.returns_numbers = member.returns_numbers
        mean, start = samples.mean(0), 0
        for piece in pieces:
            masks.look(piece, mean[start : start + n_examples(piece)])
            start += n_examples(piece)
        return summarize(mean, samples - mean, likelihood, question.link or default_link("sampled"), masks.joined(mean))

    def sampled(self, state: States, network: Network, i: int, flat: Tensor) -> dict[str, Tensor]:
        """Return parameters and buffers of member ``i``."""
        own = [*dict(network.model.named_parameters()), *dict(network.model.named_buffers())]
        return {name: state.tensors[name][i] for name in own if name in state.tensors}

    def tensors(self, state: States) -> dict[str, Tensor]:
        """Return all states."""
        return {_PREFIX + name: values for name, values in state.tensors.items()}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> States:
        """Return all states, if they have the structure of the model."""
        states = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
        own = network.model.state_dict()
        if states.keys() != own.keys() or any(states[name].shape[1:] != own[name].shape for name in own):
            msg = "other members"
            raise ValueError(msg)
        return States(states)


def _member(network: Network, state: States, i: int) -> Network:
    module = copy.deepcopy(network.model)
    module.load_state_dict({name: values[i] for name, values in state.tensors.items()})
    member = Network(module, output_fn=network.output_fn)
    member.input_signature = network.input_signature
    return member


def stacked(network: Network, states: Sequence[Mapping[str, Tensor]], source: Any = None) -> States:
    """Return the state dictionaries of the members as one value; refuse those of another structure, and NaN."""
    own = network.model.state_dict()
    for i, state in enumerate(states):
        odd = next((name for name in own if name not in state or state[name].shape != own[name].shape), None)
        if odd is not None or len(state) != len(own):
            msg = (
                f"Member {i} has another structure than the model ({odd or 'it has more tensors'}): "
                "train networks of the model's own architecture."
            )
            raise ModelError(msg)
        if not all(bool(torch.isfinite(value).all()) for value in state.values() if value.is_floating_point()):
            msg = f"Member {i} holds NaN or Inf: its training has diverged, use a smaller learning rate."
            raise ModelError(msg)
    place = network.device
    return States({name: torch.stack([state[name].detach().to(place) for state in states]) for name in own}, source)


@dataclass(frozen=True)
class _Trained(Members):
    needs = "call fit(loader, n_samples, train=lambda seed: a trained network)."


class DeepEnsemble(Baseline):
    """Networks trained from different starts (Lakshminarayanan, Pritzel and Blundell 2017), whose mean predicts.

    The model gives the structure of the members and is what ``check_fit`` compares with; it is not a member itself.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> def train(seed):
    ...     return torch.nn.Linear(2, 3)  # and train it, with that seed
    >>> x, y = torch.eye(2), torch.tensor([0, 2])
    >>> posterior = nb.baselines.DeepEnsemble(torch.nn.Linear(2, 3)).fit(x, y, n_samples=5, train=train)
    >>> posterior.predict(x).samples.shape
    torch.Size([5, 2, 3])

    Networks that are trained already are handed over one by one:

    >>> members = iter([train(0), train(1)])
    >>> posterior = posterior.fit(x, y, n_samples=2, train=lambda seed: next(members))
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

        Returns
        -------
        DeepEnsemble
            The posterior itself.
        """
        learn = self._method.fit if train is None else functools.partial(_train, train)
        return self._fit(learn, loader, targets, n_samples, **options)


def _train(train: Callable[[int], nn.Module], context: FitContext) -> Learned[States]:
    states = []
    for i in range(context.n_samples):
        member = train((context.seed + i) % 2**32)
        if not isinstance(member, nn.Module):
            msg = f"train(seed) must return a trained nn.Module, not {type(member).__name__}."
            raise ModelError(msg)
        states.append(to_device(dict(unwrapped(member).state_dict()), context.network.device))
    return Learned(stacked(context.network, states), None, "networks trained from different starts")
