"""What a fit remembers of the training data: features of some examples, rows of a table, and a checksum of each input.

Features of a network that saturates can be those of familiar inputs for any absurd input. Where inputs are rows of a
table, these examples themselves are remembered as well. A few small inputs are remembered with the network's outputs,
so that a file can tell whether a network with the same parameters is the same function.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nullbayes.decisions.classes import ClassDistances, class_distances
from nullbayes.errors import DataError, FileError, ModelError, SettingsError
from nullbayes.jacobian.batches import join_examples, leaves, n_examples, named_leaves, take_examples, with_leaves
from nullbayes.jacobian.checks import SHIFTS, rounded_parameters
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.features import FEW, OUTPUTS, FeatureReader, Seen, find_last_layer, predicted_classes
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Likelihood
from nullbayes.limits import OutOfMemory, is_out_of_memory
from nullbayes.linalg.spectral import eigh
from nullbayes.precision import full_precision

NEIGHBOURS = (1, 10, 50)
_MOST_EXAMPLES, _MOST_NUMBERS = 5000, 2**24
_MOST_COLUMNS = 1024  # of a table
_MOST_DIRECTIONS = 2048  # examples from which the principal directions of wider features are found
_SIZES = (256, 16, 1)  # examples that are read at a time, as memory allows
_AT_ONCE = 1024  # inputs whose distances are in memory at a time
_ROUNDING = 1e-7  # of a squared distance in float32
_TABLE, _COUNT = "table.", "tables"  # names in a file: of the tensors of rows, with a number, and how many there are
_PROBE, _OUTPUTS = "probe.", "outputs"  # and a place in the inputs: names of the tensors of a probe
_PROBED, _NUMBERS, _ANSWERS = 4, 2**16, 2**12  # inputs of a probe; their numbers together; outputs of each
_OF_SPREAD, _OF_SIZE, _COARSE = 1e-3, 1e-5, 5e-2  # by which outputs may differ on another machine; in half precision


@dataclass(frozen=True)
class Probe:
    """A few training inputs with the outputs of the network, which tell its function.

    Attributes
    ----------
    inputs : mapping of str to Tensor (n, ...)
        The tensors of the inputs on the CPU, by their places as JSON: names in mappings, numbers in tuples.
    outputs : Tensor (n, k)
        Some of the outputs, on the CPU.
    """

    inputs: Mapping[str, Tensor]
    outputs: Tensor

    def check(self, network: Network) -> None:
        """Refuse a network that is another function."""
        try:
            found = _answers(network, self.inputs)
        except Exception as error:
            msg = f"The model does not take the inputs that the posterior was fitted to: {error}"
            raise FileError(msg) from error
        known = self.outputs.double()
        coarse = any(torch.equal(known.to(kind).double(), known) for kind in (torch.float16, torch.bfloat16))
        share = _COARSE if coarse else _OF_SPREAD  # a model may compute in half precision
        limit = share * float(known.max() - known.min()) + _OF_SIZE * float(known.abs().max())
        if found.shape == known.shape and not float((found.double() - known).abs().max()) <= limit:
            rounded = _answers(network, self.inputs, rounded_parameters(network.whole)).double()
            limit += SHIFTS * float((rounded - found.double()).abs().max())  # where large numbers cancel
        if found.shape != known.shape or not float((found.double() - known).abs().max()) <= limit:
            msg = (
                "The model has the parameters that the posterior was fitted to, and computes something else: build it "
                "with the same layers and activations, and pass the same output_fn."
            )
            raise FileError(msg)


@dataclass(frozen=True)
class Familiar:
    """What is remembered of the training data.

    Attributes
    ----------
    layer : str
        The name of the layer whose inputs are the features.
    features : Tensor (n, d)
        The features of some examples, evenly spaced over all, each scaled to length one.
    sums : Tensor (N,)
        The checksum of every training input, on the CPU.
    table : tuple of Tensor (n, ...)
        The tensors of these examples, numbers and categories, if the inputs are rows of a table; else empty.
    tuned : Tensor (T,) or None
        The checksums of the inputs that have chosen precision or temperature since, on the CPU.
    probe : Probe or None
        A few inputs with their outputs; None if they are large, or hold other things than tensors.
    classes : Tensor (n,) or None
        The classes that the network predicts for these examples, where each has one.
    """

    layer: str
    features: Tensor
    sums: Tensor
    table: tuple[Tensor, ...] = ()
    tuned: Tensor | None = None
    probe: Probe | None = None
    classes: Tensor | None = None

    @cached_property
    def to_classes(self) -> ClassDistances | None:
        """How far features are from the classes; None where there are not two of them."""
        several = self.classes is not None and len(self.classes.unique()) > 1
        return class_distances(self.features, self.classes) if several else None  # type: ignore[arg-type]

    @cached_property
    def rows(self) -> Tensor | None:  # (n, p)
        """The numbers of the remembered rows; None where inputs are no rows of a table."""
        return rows_of(self.table) if self.table else None

    def inputs(self, like: Any, most: int) -> Any:
        """Return the remembered rows, at most so many and evenly spaced, as inputs of the same form as others."""
        step = -(-len(self.features) // most)
        return with_leaves(like, (tensor[::step] for tensor in self.table))

    def row_distances(self, x: Any) -> Tensor:  # (n,)
        """Return the logarithm of the distance to the nearest remembered row, in standard deviations per column."""
        known, new = self.rows, rows_of(x)
        assert known is not None
        if new is None or new.shape[1] != known.shape[1]:
            msg = "The inputs are no rows of the table that the network was trained on."
            raise DataError(msg)
        known, new = known.double(), new.double()
        spread = known.std(0, unbiased=False)
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        parts = [torch.cdist(some, known / spread).amin(1) for some in (new / spread).split(_AT_ONCE)]
        nearest: Tensor = torch.cat(parts) / known.shape[1] ** 0.5
        return nearest.clamp_min(_ROUNDING).log()

    def scales(self, x: Any) -> Iterator[tuple[float, float]]:
        """Iterate over the numbers of inputs: how far off they are on average, and how many times as spread out.

        Both are compared with remembered inputs, in their standard deviations: the median over the columns of a table,
        or each tensor as a whole. Columns of rare categories are constant in a few rows, so that the spread is the
        root mean square over the columns where that is nearer to one.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        if self.rows is not None:
            new = rows_of(x)
            pairs = [(self.rows, new)] if new is not None and new.shape[1] == self.rows.shape[1] else []
        elif self.probe is not None:
            here = _places(x, [])
            both = ((leaf, here.get(place)) for place, leaf in self.probe.inputs.items() if leaf.is_floating_point())
            pairs = [(known.reshape(-1, 1), new.reshape(-1, 1)) for known, new in both if new is not None]
        for known, new in ((a.double().cpu(), b.double().cpu()) for a, b in pairs):
            spread = known.std(0, unbiased=False)
            varies = spread > 0
            if bool(varies.any()):
                away, wider = (new.mean(0) - known.mean(0)).abs() / spread, new.std(0, unbiased=False) / spread
                spreads = float(wider[varies].median()), float(wider[varies].square().mean().sqrt())
                yield float(away[varies].median()), min(spreads, key=_off_one)

    def distances(self, features: Tensor) -> Tensor:  # (n, d) -> (n, k)
        """Return the logarithm of the distance to the 1st, 10th and 50th nearest remembered example.

        Features are scaled to length one before (Sun et al. 2022).
        """
        ranks = [min(k, len(self.features)) for k in NEIGHBOURS]
        found = []
        for some in normalize(features.to(self.features)).split(_AT_ONCE):
            near = (some @ self.features.T).topk(max(ranks)).values
            found.append(2.0 - 2.0 * near[:, [rank - 1 for rank in ranks]].double())
        return torch.cat(found).clamp_min(_ROUNDING).log() / 2.0

    def residual(self, features: Tensor) -> Tensor:  # (n, d) -> (n,)
        """Return the logarithm of the distance of the features to the principal directions of the remembered ones.

        Features are scaled to length one before. Of all directions in which the remembered features vary, the half in
        which they vary most counts as principal (Wang et al. 2022).
        """
        mean, leading = self._principal
        centred = normalize(features.to(self.features)) - mean
        squares = centred.square().sum(1) - (centred @ leading).square().sum(1)
        return squares.double().clamp_min(_ROUNDING).log() / 2.0

    @cached_property
    def _principal(self) -> tuple[Tensor, Tensor]:  # (d,), (d, k)
        """The mean of the remembered features, and their principal directions, found in float64."""
        step = -(-len(self.features) // _MOST_DIRECTIONS) if self.features.shape[1] > _MOST_DIRECTIONS else 1
        known = self.features[::step].double()
        mean = known.mean(0)
        centred = known - mean
        few = len(centred) < centred.shape[1]  # then the matrix of the examples is the smaller one
        values, vectors = eigh(centred @ centred.T if few else centred.T @ centred)
        rank = int((values > _ROUNDING * values[-1].clamp_min(_ROUNDING)).sum())
        leading = vectors[:, len(values) - rank // 2 :]
        leading = normalize(centred.T @ leading, dim=0) if few else leading
        return mean.to(self.features), leading.to(self.features)

    @property
    def repeated(self) -> float:
        """The share of training inputs that occur more than once.

        About as many new inputs are equal to a training input by chance (Good 1953): none for photographs, many for a
        table of a few categories.
        """
        return repeated_share(self.sums)

    def seen_in(self, sums: Tensor) -> Tensor:  # (n,) -> bool (n,)
        """Return which inputs, given by their checksums, were training inputs."""
        return torch.isin(sums, self.sums)


def _off_one(ratio: float) -> float:
    """Return how many times as large or as small as one a ratio is."""
    return max(ratio, 1.0 / ratio) if ratio > 0.0 else math.inf


def remember(network: Network, examples: Examples, likelihood: Likelihood | None = None) -> Familiar | None:
    """Read the features of some training examples; None where memory is too small for a few."""
    for size in _SIZES:
        found = examples.group.attempt(partial(_remembered, network, examples, likelihood, size))
        if not isinstance(found, OutOfMemory):
            return found
    return None


def _remembered(network: Network, examples: Examples, likelihood: Likelihood | None, size: int) -> Familiar:
    first = examples.read(0, min(FEW, len(examples)))[0]
    layer, about = find_last_layer(network, first)[0], partial(predicted_classes, likelihood)
    try:
        seen, few = _features(FeatureReader(network, layer), first, examples, size, about)
    except ModelError:  # a layer that is called in another way for more examples
        layer = OUTPUTS
        seen, few = _features(FeatureReader(network, layer), first, examples, size, about)
    join = examples.group.join
    features = join(normalize(seen.features))
    classes = join(seen.outputs) if seen.outputs.ndim == 1 else None
    table = () if rows_of(first) is None else tuple(map(join, _table(first, examples, len(features))))
    probe = examples.group.first(lambda: make_probe(network, join_examples(few) if few else first))
    return Familiar(layer, features, join(examples.input_sums), table, probe=probe, classes=classes)


def repeated_share(sums: Tensor) -> float:  # (n,)
    """Return the share of inputs, given by their checksums, that occur more than once."""
    counts = sums.unique(return_counts=True)[1]
    return 1.0 - float((counts == 1).sum()) / len(sums)


def rows_of(x: Any) -> Tensor | None:  # (n, p)
    """Return the numbers of inputs that are rows of a table, beside categories or not; None for other inputs."""
    numbers = [leaf for leaf in named_leaves(x) if leaf.is_floating_point()]
    if not numbers or any(leaf.ndim != 2 for leaf in numbers) or any(leaf.ndim > 2 for leaf in leaves(x)):
        return None
    joined = torch.cat(numbers, dim=1)
    return joined if joined.shape[1] <= _MOST_COLUMNS else None


def _table(first: Any, examples: Examples, n: int) -> list[Tensor]:  # (n, ...) each
    """Return the tensors of so many examples, evenly spaced over all."""
    parts = [named_leaves(x) for x, _ in examples.some(_spaced(examples, n))]
    none = [leaf[:0] for leaf in named_leaves(first)]
    return [torch.cat(same) for same in zip(none, *parts, strict=True)]


def _spaced(examples: Examples, n: int) -> list[int]:
    """Return the numbers of n examples, evenly spaced over all: those that this process has."""
    return examples.parts([i * examples.n_all // n for i in range(n)])[examples.group.rank]


def _features(
    reader: FeatureReader, first: Any, examples: Examples, size: int, about: Callable[[Tensor], Tensor]
) -> tuple[Seen, list[Any]]:
    """Return features and classes of as many examples as are remembered, evenly spaced, and a few of the inputs."""
    most = min(_MOST_EXAMPLES, max(1, _MOST_NUMBERS // reader(first).features.shape[1]), examples.n_all)
    numbers, few = _spaced(examples, most), list[Any]()
    return reader.some(_watched(examples.some(numbers), len(numbers), few), size, about), few


def _watched(batches: Iterable[tuple[Any, Tensor]], n: int, few: list[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Pass on batches of n examples, and add a few of their inputs to a list: data may be in the order of classes."""
    start, most = 0, min(_PROBED, n)
    for x, y in batches:
        while len(few) < most and (i := len(few) * n // most - start) < len(y):
            few.append(join_examples([take_examples(x, i, i + 1)]))  # a copy: a slice would keep the whole batch
        yield x, y
        start += len(y)


def make_probe(network: Network, x: Any) -> Probe | None:
    """Return a few inputs with their outputs, if they are small and made of tensors with an entry per example."""
    found = _places(x, [])
    if not found or any(leaf is None or leaf.is_complex() for leaf in found.values()):
        return None
    parts = {place: leaf for place, leaf in sorted(found.items()) if leaf is not None}
    few = min(_PROBED, _NUMBERS // max(1, sum(leaf[:1].numel() for leaf in parts.values())))
    step = max(1, n_examples(x) // max(1, few))
    inputs = {place: leaf[::step][:few].cpu().clone() for place, leaf in parts.items()}
    try:
        outputs = _answers(network, inputs) if few else None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None  # a network that does not take so few examples
    return None if outputs is None or not bool(torch.isfinite(outputs).all()) else Probe(inputs, outputs)


def _places(x: Any, path: list[Any]) -> dict[str, Tensor | None]:
    """Return the tensors of inputs by their places, and None for what is no tensor with an entry per example."""
    if isinstance(x, Mapping) and x and all(isinstance(name, str) for name in x):
        entries: Iterable[tuple[Any, Any]] = x.items()
    elif isinstance(x, (tuple, list)) and x:
        entries = enumerate(x)
    else:
        return {json.dumps(path): x if isinstance(x, Tensor) and x.ndim else None}
    return {place: leaf for key, part in entries for place, leaf in _places(part, [*path, key]).items()}


@full_precision()
def _answers(network: Network, inputs: Mapping[str, Tensor], theta: Tensor | None = None) -> Tensor:  # (n, k)
    """Return some of the outputs of a network for the inputs of a probe, with its own or with other parameters."""
    tree: dict[Any, Any] = {}
    for place, leaf in inputs.items():
        path: list[Any] = [None, *json.loads(place)]
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf.to(network.device)
    x = _inputs(tree[None])
    with torch.no_grad():
        outputs = network.outputs(x) if theta is None else network.whole(theta, x)
    outputs = outputs.reshape(len(outputs), -1)
    return outputs[:, :: -(-outputs.shape[1] // _ANSWERS)].cpu()


def _inputs(tree: Any) -> Any:
    """Return inputs from their tensors by place."""
    if isinstance(tree, Tensor):
        return tree
    parts = {key: _inputs(part) for key, part in tree.items()}
    return tuple(parts[i] for i in range(len(parts))) if all(isinstance(key, int) for key in parts) else parts


def to_file(familiar: Familiar | None) -> tuple[str | None, dict[str, Tensor]]:
    """Return what the header and the tensors of a file hold."""
    if familiar is None:
        return None, {}
    count = torch.tensor(len(familiar.table), dtype=torch.int64, device="cpu")
    found = {"features": familiar.features, "sums": familiar.sums, _COUNT: count}
    found |= {} if familiar.tuned is None else {"tuned": familiar.tuned}
    found |= {} if familiar.classes is None else {"classes": familiar.classes}
    if familiar.probe is not None:
        found |= {_OUTPUTS: familiar.probe.outputs}
        found |= {f"{_PROBE}{place}": leaf for place, leaf in familiar.probe.inputs.items()}
    found |= {f"{_TABLE}{i}": tensor for i, tensor in enumerate(familiar.table)}
    return familiar.layer, {f"familiar.{name}": tensor for name, tensor in found.items()}


def from_file(
    layer: str | None, tensors: Mapping[str, Tensor], network: Network, n_data: int | None
) -> Familiar | None:
    """Return what a file holds, if it is that of so many training examples."""
    if layer is None:
        return None
    parts = ("features", "sums", "tuned", "classes", _COUNT)
    features, sums, tuned, classes, count = (tensors.get(f"familiar.{name}") for name in parts)
    names = [name for name in tensors if name.startswith(f"familiar.{_TABLE}")]
    table = [tensors.get(f"familiar.{_TABLE}{i}") for i in range(len(names))]
    start, outputs = f"familiar.{_PROBE}", tensors.get(f"familiar.{_OUTPUTS}")
    inputs = {name.removeprefix(start): leaf for name, leaf in sorted(tensors.items()) if name.startswith(start)}
    if (
        features is None or features.ndim != 2 or not features.numel() or features.dtype != network.dtype
        or not bool(torch.isfinite(features).all())
        or sums is None or sums.ndim != 1 or len(sums) != (n_data or len(sums)) or sums.dtype != torch.int64
        or count is None or count.numel() != 1 or int(count) != len(table)
        or (tuned is not None and (tuned.ndim != 1 or tuned.dtype != torch.int64))
        or (classes is not None and (classes.shape != features.shape[:1] or classes.dtype != torch.int64))
        or any(part is None or not 1 <= part.ndim <= 2 or len(part) != len(features) for part in table)
        or (table and rows_of(table) is None)
        or (outputs is None) is not (not inputs)
        or (outputs is not None and (outputs.ndim != 2 or not outputs.numel() or outputs.dtype != network.dtype))
        or any(not leaf.ndim or outputs is None or len(leaf) != len(outputs) for leaf in inputs.values())
    ):  # fmt: skip
        msg = "The file lacks what was remembered of the training data: it was altered, fit and save again."
        raise FileError(msg)
    try:
        FeatureReader(network, layer)
    except SettingsError as error:
        msg = f"The file remembers features of a layer {layer!r}, which this model has not: fit and save again."
        raise FileError(msg) from error
    here = tuple(part.to(network.device) for part in table if part is not None)
    probe = None if outputs is None else Probe(inputs, outputs)
    if probe is not None:
        probe.check(network)
    classes = None if classes is None else classes.to(network.device)
    return Familiar(layer, features.to(network.device), sums, here, tuned, probe, classes)
