"""What a fit reads of the training data to remember it, and the probe by which a file knows the network again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nullbayes.decisions.appearance import looks, usual_looks
from nullbayes.decisions.familiar import Familiar, Probe
from nullbayes.errors import FileError, ModelError
from nullbayes.jacobian.batches import join_examples, n_examples, named_leaves, table_rows, take_examples, with_leaves
from nullbayes.jacobian.checks import SHIFTS, rounded_parameters
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.features import FEW, OUTPUTS, FeatureReader, find_last_layer
from nullbayes.jacobian.network import Network
from nullbayes.limits import OutOfMemory, is_out_of_memory
from nullbayes.precision import full_precision

_MOST_EXAMPLES, _MOST_NUMBERS = 5000, 2**24
_SIZES = (256, 16, 1)  # examples that are read at a time, as memory allows
_ALIKE = 0.01  # of the inputs may be equal to others in single precision alone; of more, all digits count
_PROBED, _NUMBERS, _ANSWERS = 4, 2**16, 2**12  # inputs of a probe; their numbers together; outputs of each
_OF_SPREAD, _OF_SIZE, _COARSE = 1e-3, 1e-5, 5e-2  # by which outputs may differ on another machine; in half precision


def remember(network: Network, examples: Examples) -> Familiar | None:
    """Read the features of some training examples; None where memory is too small for a few."""
    for size in _SIZES:
        found = examples.group.attempt(partial(_remembered, network, examples, size))
        if not isinstance(found, OutOfMemory):
            return found
    return None


def _remembered(network: Network, examples: Examples, size: int) -> Familiar:
    first = examples.read(0, min(FEW, len(examples)))[0]
    layer, _ = find_last_layer(network, first)
    try:
        features, few, seen = _features(FeatureReader(network, layer), first, examples, size)
    except ModelError:  # a layer that is called in another way for more examples
        layer = OUTPUTS
        features, few, seen = _features(FeatureReader(network, layer), first, examples, size)
    features = examples.group.join(normalize(features))
    table = () if table_rows(first) is None else _table(first, examples, len(features))
    probed = with_leaves(first, iter(_leaves_of_all(first, examples, few)))
    probe = examples.group.first(lambda: make_probe(network, probed))
    sums, as_they_are = map(examples.group.join, (examples.input_sums, examples.exact_sums))
    exact = len(as_they_are.unique()) - len(sums.unique()) > _ALIKE * len(sums)
    usual = usual_looks(examples.group.join(torch.cat(seen)).cpu()) if seen else None
    return Familiar(layer, features, as_they_are if exact else sums, table, probe=probe, exact=exact, looks=usual)


def _table(first: Any, examples: Examples, n: int) -> tuple[Tensor, ...]:  # (n, ...) each
    """Return the tensors of so many examples, evenly spaced over all."""
    return _leaves_of_all(first, examples, [x for x, _ in examples.some(_spaced(examples, n)[0])])


def _leaves_of_all(first: Any, examples: Examples, parts: list[Any]) -> tuple[Tensor, ...]:
    """Return the tensors of the inputs that all processes have, in order; ``first`` are some of the same form."""
    none = [leaf[:0] for leaf in named_leaves(first)]
    each = (torch.cat(same) for same in zip(none, *map(named_leaves, parts), strict=True))
    return tuple(map(examples.group.join, each))


def _spaced(examples: Examples, n: int) -> tuple[list[int], int]:
    """Return the numbers of n examples, evenly spaced over all: of those that this process has, and how many before."""
    parts = examples.parts([i * examples.n_all // n for i in range(n)])
    return parts[examples.group.rank], sum(map(len, parts[: examples.group.rank]))


def _features(
    reader: FeatureReader, first: Any, examples: Examples, size: int
) -> tuple[Tensor, list[Any], list[Tensor]]:  # (n, d)
    """Return the features of as many examples as are remembered, a few of the inputs, and what all of them look like.

    The examples are evenly spaced over all.
    """
    most = min(_MOST_EXAMPLES, max(1, _MOST_NUMBERS // reader(first).features.shape[1]), examples.n_all)
    numbers, before = _spaced(examples, most)
    probed = min(_PROBED, most)
    wanted, few = [i * most // probed - before for i in range(probed)], list[Any]()
    none = looks(take_examples(first, 0, 1)) if table_rows(first) is None else None
    seen = [] if none is None else [none[:0]]
    return reader.some(_watched(examples.some(numbers), wanted, few, seen), size), few, seen


def _watched(
    batches: Iterable[tuple[Any, Tensor]], wanted: list[int], few: list[Any], seen: list[Tensor]
) -> Iterator[tuple[Any, Tensor]]:
    """Pass on batches, and add to lists some of their inputs and what they look like: data may be in any order."""
    start = 0
    for x, y in batches:
        if seen and (found := looks(x)) is not None:
            seen.append(found)
        inside = (i - start for i in wanted if start <= i < start + len(y))
        few += [join_examples([take_examples(x, i, i + 1)]) for i in inside]  # a slice would keep the whole batch
        yield x, y
        start += len(y)


def make_probe(network: Network, x: Any) -> Probe | None:
    """Return a few inputs with their outputs, if they are small and made of tensors with an entry per example."""
    found = by_place(x)
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


def check_probe(probe: Probe, network: Network) -> None:
    """Refuse a network that is another function.

    It may have the same parameters and other activations, other layers without parameters, or another ``output_fn``.
    """
    try:
        found = _answers(network, probe.inputs).double()
    except Exception as error:
        msg = f"The model does not take the inputs that the posterior was fitted to: {error}"
        raise FileError(msg) from error
    known = probe.outputs.double()
    coarse = any(torch.equal(known.to(kind).double(), known) for kind in (torch.float16, torch.bfloat16))
    share = _COARSE if coarse else _OF_SPREAD  # a model may compute in half precision
    limit = share * float(known.max() - known.min()) + _OF_SIZE * float(known.abs().max())
    apart = float((found - known).abs().max()) if found.shape == known.shape else math.inf
    if math.isfinite(apart) and apart > limit:
        rounded = _answers(network, probe.inputs, rounded_parameters(network.whole)).double()
        limit += SHIFTS * float((rounded - found).abs().max())  # where large numbers cancel
    if not (math.isfinite(apart) and apart <= limit):
        msg = (
            "The model has the parameters that the posterior was fitted to, and computes something else: build it "
            "with the same layers and activations, and pass the same output_fn."
        )
        raise FileError(msg)


def by_place(x: Any, path: tuple[Any, ...] = ()) -> dict[str, Tensor | None]:
    """Return the tensors of inputs by their places, and None for what is no tensor with an entry per example."""
    if isinstance(x, Mapping) and x and all(isinstance(name, str) for name in x):
        entries: Iterable[tuple[Any, Any]] = x.items()
    elif isinstance(x, (tuple, list)) and x:
        entries = enumerate(x)
    else:
        return {json.dumps(path): x if isinstance(x, Tensor) and x.ndim else None}
    return {place: leaf for key, part in entries for place, leaf in by_place(part, (*path, key)).items()}


def _inputs(parts: Mapping[tuple[Any, ...], Tensor]) -> Any:
    """Return inputs from their tensors by place."""
    if () in parts:
        return parts[()]
    keys = sorted({path[0] for path in parts})
    found = {key: _inputs({path[1:]: leaf for path, leaf in parts.items() if path[0] == key}) for key in keys}
    return tuple(found.values()) if isinstance(keys[0], int) else found


@full_precision()
def _answers(network: Network, inputs: Mapping[str, Tensor], theta: Tensor | None = None) -> Tensor:  # (n, k)
    """Return some of the outputs of a network for the inputs of a probe, with its own or with other parameters."""
    x = _inputs({tuple(json.loads(place)): leaf.to(network.device) for place, leaf in inputs.items()})
    with torch.no_grad():
        outputs = network.outputs(x) if theta is None else network.whole(theta, x)
    outputs = outputs.reshape(len(outputs), -1)
    return outputs[:, :: -(-outputs.shape[1] // _ANSWERS)].cpu()
