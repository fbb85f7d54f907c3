"""Methods whose samples are whole networks: other parameters, and running statistics of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline, Work
from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.batches import n_examples
from nullbayes.jacobian.network import Network
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Masks, Prediction, default_link, joined, stream, summarize

_PREFIX = "member."


class Members(Baseline):
    """Networks of the same structure, each with parameters and buffers of its own; abstract.

    Predictions are the members' own outputs: there is nothing to linearize around.
    """

    _hessian = _has_prior = False
    _link = default_link("sampled")
    _states: Mapping[str, Tensor]  # by name, stacked (S, ...)
    _needs: str  # what fit must be given

    def _learn(self, work: Work) -> tuple[int | None, str]:
        msg = f"{type(self).__name__} learns from networks in training: {self._needs}"
        raise SettingsError(msg)

    def _take_members(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Hold the state dictionaries of the members, and their parameters as directions."""
        own = self._network.model.state_dict()
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
        place = self._network.device
        self._states = {name: torch.stack([state[name].detach().to(place) for state in states]) for name in own}
        self._directions = self._network.flatten(self._states) - self._network.theta

    def _member(self, i: int) -> Network:
        """Return a member as a network."""
        module = copy.deepcopy(self._network.model)
        module.load_state_dict({name: values[i] for name, values in self._states.items()})
        member = Network(module, output_fn=self._network.output_fn)
        member.input_signature = self._network.input_signature
        return member

    def _sampled_tensors(self, i: int) -> dict[str, Tensor]:
        model = self._network.model
        own = [*dict(model.named_parameters()), *dict(model.named_buffers())]
        return {name: self._states[name][i] for name in own if name in self._states}

    @full_precision()
    def predict(
        self,
        x: Any,
        *,
        pred_type: str = "sampled",
        n_samples: int | None = None,
        link_approx: str | None = None,
        mask: Mask = None,
    ) -> Prediction:
        """Predict with every member; see :meth:`SamplePosterior.predict`. ``pred_type`` is "sampled"."""
        self._network.check_unchanged()
        used = len(self._deviations(n_samples))
        if pred_type != "sampled":
            msg = f'pred_type must be "sampled" for {type(self).__name__}, whose members answer themselves.'
            raise SettingsError(msg)
        if used < 2:
            msg = "n_samples must be at least 2 to speak of a variance, not 1."
            raise SettingsError(msg)
        pieces = list(stream(x, self._network, self._batch_fn, used))
        members, masks = (self._member(i) for i in range(used)), Masks(self._likelihood, mask)
        samples = torch.stack([joined([member.outputs(piece) for piece in pieces]) for member in members])
        mean, start = samples.mean(0), 0
        for piece in pieces:
            masks.look(piece, mean[start : start + n_examples(piece)])
            start += n_examples(piece)
        return summarize(mean, samples - mean, self._likelihood, link_approx or self._link, masks.joined(mean))

    __call__ = predict

    def ood_score(
        self,
        x: Any,
        kind: str = "max_variance",
        *,
        per: str = "input",
        mask: Mask = None,
        pred_type: str = "sampled",
    ) -> Tensor:  # (N,) or (N, ...)
        """Return one number an input; see :meth:`SamplePosterior.ood_score`."""
        return super().ood_score(x, kind, per=per, mask=mask, pred_type=pred_type)

    def _evaluate(self, loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = zip(*self._pieces(loader), strict=True)
        outputs, y = joined([self._network.outputs(x) for x in inputs]), torch.cat(targets)
        self._likelihood.check(outputs, y)
        return outputs, self.predict(list(inputs)).samples - outputs, y

    def _tensors(self) -> dict[str, Tensor]:
        return {_PREFIX + name: values for name, values in self._states.items()}

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        states = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
        own = self._network.model.state_dict()
        if states.keys() != own.keys() or any(states[name].shape[1:] != own[name].shape for name in own):
            msg = "other members"
            raise ValueError(msg)
        self._states = states
