"""What detectors of features share: the layer, what the network computes for the training data, and files.

A detector is two classes. A frozen :class:`FeatureScore` says in ``learn`` what it takes from the training data, as
named tensors, and in ``score`` how it scores new inputs. A public class derived from :class:`Detector` holds it.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.map_estimate import NetworkItself
from nullbayes.baselines.method import FitContext, Learned, LikelihoodLike, Options, Question
from nullbayes.errors import DataError, LikelihoodError, ModelError, SettingsError
from nullbayes.jacobian.features import FEW, FeatureReader, Head, Seen, find_last_layer
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Likelihood
from nullbayes.precision import full_precision
from nullbayes.predictive import stream

Tensors = Mapping[str, Tensor]
WIDE = 8192  # examples whose features are in float64 at a time


@dataclass(frozen=True)
class Training:
    """What the network computes for the training examples whose targets count.

    Attributes
    ----------
    features : Tensor (N, d)
        Their features.
    outputs : Tensor (N, C)
        Their outputs; empty for a detector that needs no classes.
    classes : Tensor (N,)
        Their classes; where targets are probabilities, the most probable one. Empty for the same detectors.
    """

    features: Tensor
    outputs: Tensor
    classes: Tensor


@dataclass(frozen=True)
class FeatureState:
    """The name of the layer whose inputs are the features, and what a detector has learned from them."""

    layer: str
    tensors: Tensors


@dataclass(frozen=True)
class FeatureScore(NetworkItself):
    """A score of features and outputs; abstract. A subclass is a frozen dataclass whose fields are its settings."""

    features: str | None = None

    needs_classes: ClassVar[bool] = True  # works for "classification" with outputs (n, C) only
    needs_head: ClassVar[bool] = False  # the features must go into a linear layer that returns the outputs
    needs_data: ClassVar[bool] = True
    most: ClassVar[int | None] = None  # training examples that are kept, evenly spaced
    layout: ClassVar[Mapping[str, str]] = {}  # of each tensor: a letter per dimension; d: features, c: outputs

    def __post_init__(self) -> None:
        """Refuse a name that is none."""
        if not (self.features is None or isinstance(self.features, str)):
            msg = f"features must be the name of a layer, as in model.named_modules(), not {self.features!r}."
            raise SettingsError(msg)

    @abstractmethod
    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        """Return what the score needs to know of the training data; names and dimensions as in ``layout``."""

    @abstractmethod
    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:  # (n,)
        """Return one number per input: higher is stranger."""

    @full_precision()
    def fit(self, context: FitContext) -> Learned[FeatureState]:
        """Read the features of all training examples once, and learn from them."""
        network, examples = context.network, context.rows.examples
        few = examples.read(0, min(FEW, len(examples)))[0]
        if self.needs_classes:
            check_classes(context.name, context.rows.likelihood, network.output_shape(few))
        layer = find_last_layer(network, few)[0] if self.features is None else self.features
        reader = FeatureReader(network, layer)
        if self.needs_head:
            _check_head(context.name, reader, few)
        training = self._read(reader, context) if self.needs_data else _nothing(network)
        found = self.learn(training, reader.head())
        return Learned(FeatureState(layer, found), None, f"features from the inputs of the layer {layer!r}")

    def _read(self, reader: FeatureReader, context: FitContext) -> Training:
        examples, likelihood, n = context.rows.examples, context.rows.likelihood, len(context.rows.examples)
        features, outputs, classes, start = [], [], [], 0
        wanted = torch.ones(n, dtype=torch.bool, device=context.network.device)
        if self.most is not None and n > self.most:
            wanted[:] = False
            wanted[torch.arange(self.most, device=wanted.device) * n // self.most] = True
        for seen, y in reader.all(examples):
            keep = wanted[start : start + len(y)] & counting(likelihood, seen.outputs, y)
            start += len(y)
            features.append(seen.features[keep])
            if self.needs_classes:
                outputs.append(seen.outputs[keep])
                classes.append(classes_of(y)[keep])
        none = _nothing(context.network)
        return Training(torch.cat(features), torch.cat(outputs or [none.outputs]), torch.cat(classes or [none.classes]))

    def score_inputs(self, state: FeatureState, question: Question) -> Tensor:  # (N,)
        """Return the score of each input."""
        reader = FeatureReader(question.network, state.layer)
        head = reader.head()
        pieces = stream(question.x, question.network, question.batch_fn, 1)
        return torch.cat([self.score(reader(piece), state.tensors, head) for piece in pieces])

    def tensors(self, state: FeatureState) -> dict[str, Tensor]:
        """Return what was learned."""
        return dict(state.tensors)

    def restored(self, tensors: Tensors, network: Network, seed: int) -> FeatureState:
        """Return the state from a file's tensors."""
        if self.features is None:
            msg = "no name of a layer"
            raise ValueError(msg)
        head = FeatureReader(network, self.features).head()
        sizes = {} if head is None else dict(zip("cd", head.weight.shape, strict=True))
        return FeatureState(self.features, fitting(tensors, self.layout, sizes))


class Detector(Baseline):
    """A score of features; abstract: a subclass sets ``_method``, which is a :class:`FeatureScore`.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean.
    features : str, optional
        The name of the layer whose inputs are the features.
    parameters, prior_precision, batch_fn, output_fn : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`.
    """

    _method: FeatureScore

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        features: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = dataclasses.replace(self._method, features=features)

    def _header(self) -> dict[str, Any]:
        """Add the name of the layer that was found to the settings."""
        header = Baseline._header(self)
        return {**header, "settings": {**header["settings"], "features": self._need_fit().state.layer}}


def check_classes(name: str, likelihood: Likelihood, shape: tuple[int, ...]) -> None:
    """Refuse anything but one class per input; ``shape`` is that of the outputs of one example."""
    if likelihood.name == "classification" and len(shape) == 1:
        return
    given = f"a {likelihood.name} likelihood" if likelihood.name != "classification" else f"outputs (n, *{shape})"
    msg = (
        f'{name} needs one class per input, likelihood="classification" with outputs (n, C), not {given}: use '
        "nb.detectors.KNN, which needs no classes."
    )
    raise LikelihoodError(msg)


def check_fraction(name: str, value: Any, *, zero: bool = False) -> None:
    """Refuse settings that are not between 0 and 1; ``zero`` permits 0 itself."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (0.0 < value < 1.0 or (zero and value == 0.0)):
        msg = f"{name} must be a number between 0 and 1, such as 0.9, not {value!r}."
        raise SettingsError(msg)


def counting(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:  # bool (n,)
    """Return which examples have a target that counts."""
    counted = likelihood.counted(outputs, targets)
    if counted is None:
        return torch.ones(len(outputs), dtype=torch.bool, device=outputs.device)
    return counted.flatten(1).any(1)


def classes_of(targets: Tensor) -> Tensor:  # (n,) labels or (n, C) probabilities -> (n,)
    """Return the class of each example, the most probable one where targets are probabilities."""
    return targets.argmax(1) if targets.is_floating_point() else targets.reshape(len(targets)).long()


def groups(classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each example's class among those that occur, and how often each of them does."""
    if not len(classes):
        msg = "Every training target is ignored: there are no classes to learn from."
        raise DataError(msg)
    _, index, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    return index, counts


def fitting(tensors: Tensors, layout: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the tensors that a layout names; refuse dimensions that do not fit each other or the sizes given."""
    found, known = {name: tensors[name] for name in layout}, dict(sizes)
    for name, letters in layout.items():
        shape = found[name].shape
        fits = len(shape) == len(letters) and all(known.setdefault(a, s) == s for a, s in zip(letters, shape))  # noqa: B905
        if not fits or not found[name].is_floating_point() or not bool(torch.isfinite(found[name]).all()):
            msg = f"{name} of shape {tuple(shape)}"
            raise ValueError(msg)
    return found


def moments(features: Tensor, means: Tensor, index: Tensor) -> Tensor:  # (N, d), (k, d), (N,) -> (d, d)
    """Return the sum of the outer products of features around means, each around that of its index, in float64."""
    found = means.new_zeros(means.shape[1], means.shape[1])
    for some, places in zip(features.split(WIDE), index.split(WIDE), strict=True):
        apart = some.double() - means[places]
        found += apart.T @ apart
    return found


def energy(logits: Tensor) -> Tensor:  # (n, C) -> (n,)
    """Return the free energy of logits."""
    return -logits.logsumexp(-1)


def _nothing(network: Network) -> Training:
    empty = network.theta.new_zeros(0)
    return Training(empty, empty, empty.long())


def _check_head(name: str, reader: FeatureReader, x: Any) -> None:
    """Refuse features that do not go into a linear layer that returns the outputs."""
    head, seen = reader.head(), reader(x)
    if head is not None and len(head.weight) == seen.outputs.shape[1]:
        apart = head(seen.features) - seen.outputs
        if float(apart.abs().max()) <= 1e-3 * float(seen.outputs.abs().max()) + 1e-6:
            return
    msg = (
        f"{name} computes outputs from features, but what the layer {reader.layer!r} makes of its inputs is not the "
        "output of the model: name the linear layer whose outputs are the logits, features=..., or use "
        "nb.detectors.KNN, which needs features only."
    )
    raise ModelError(msg)
