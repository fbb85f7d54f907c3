"""Batches: inputs in any nesting of tensors, and targets; how they are split, cut and joined."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nullbayes.errors import DataError
from nullbayes.hashing import checksums

BatchFn = Callable[[Any], tuple[Any, Tensor]]
_TOKENS = (torch.bool, torch.int16, torch.int32)  # hashed as int64; bytes stay, which images are made of
_COLUMNS = "; columns "  # in a signature, before the names of the columns of a table
_NAMED_COLUMNS = 20  # that an error lists
NUMBERED = "numpy.unique(labels, return_inverse=True)[1] has the numbers of classes in alphabetical order."
_MOST_COLUMNS = 1024  # of a table
TARGETS = ("labels", "label", "targets", "target", "y")
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")
_NO_WEIGHTS = (
    "weights of examples change nothing, as rows count by their direction alone (leave out examples of weight zero)"
)


def leaves(x: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of an input: a tensor, or a tuple, list or mapping of inputs."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from leaves(value)
    elif isinstance(x, (tuple, list)):
        for value in x:
            yield from leaves(value)


def input_checksums(x: Any, n: int, *more: Tensor) -> Tensor:  # (n,) int64
    """Return the checksum of each of ``n`` inputs, whatever the order of a mapping and the width of tokens.

    ``more`` are tensors that count beside them, such as targets.
    """
    inputs = [leaf.long() if leaf.dtype in _TOKENS else leaf for leaf in leaves(_sorted(x))]
    return checksums([*inputs, *more], n)


def single_checksums(x: Any, n: int, exact: Tensor | None = None) -> Tensor:  # (n,) int64
    """Return the checksums of inputs in single precision, by which the same data are found again in another one.

    ``exact`` are the checksums of the inputs as they are, if they are known.
    """
    others = [leaf for leaf in leaves(x) if leaf.is_floating_point() and leaf.dtype != torch.float32]
    if exact is not None and not others:
        return exact
    return input_checksums(map_leaves(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, x), n)


def _sorted(x: Any) -> Any:
    """Return inputs with the names of each mapping in alphabetical order."""
    if isinstance(x, Mapping):
        return {name: _sorted(x[name]) for name in sorted(x, key=str)}
    return [_sorted(part) for part in x] if isinstance(x, (tuple, list)) else x


def named_leaves(x: Any) -> list[Tensor]:
    """Return the tensors of an input that have an entry per example, whatever the order of a mapping."""
    return [leaf for leaf in leaves(_sorted(x)) if leaf.ndim]


def with_leaves(x: Any, tensors: Iterator[Tensor]) -> Any:
    """Return an input with other tensors in place of those that :func:`named_leaves` returns."""
    if isinstance(x, Mapping):
        made = {name: with_leaves(x[name], tensors) for name in sorted(x, key=str)}
        return {name: made[name] for name in x}
    if isinstance(x, (tuple, list)):
        return tuple(with_leaves(part, tensors) for part in x)
    return next(tensors) if isinstance(x, Tensor) and x.ndim else x


def table_rows(x: Any) -> Tensor | None:  # (n, p)
    """Return the numbers of inputs that are rows of a table, beside categories or not; None for other inputs."""
    numbers = [leaf for leaf in named_leaves(x) if leaf.is_floating_point()]
    if not numbers or any(leaf.ndim != 2 for leaf in numbers) or any(leaf.ndim > 2 for leaf in leaves(x)):
        return None
    joined = torch.cat(numbers, dim=1)
    return joined if joined.shape[1] <= _MOST_COLUMNS else None


def map_leaves(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Apply a function to every tensor of inputs of the same structure; other values are taken from the first."""
    if isinstance(x, Tensor):
        return function(x, *others)
    if isinstance(x, Mapping):
        return {key: map_leaves(function, value, *(o[key] for o in others)) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        parts = [map_leaves(function, value, *(o[i] for o in others)) for i, value in enumerate(x)]
        return tuple(parts)
    return x


def _no_numbers(x: Any, array: np.ndarray) -> str:
    """Say what to do with an array or a table that cannot be made a tensor."""
    if array.ndim != 2 or not hasattr(x, "columns"):
        return f"An array of {array.dtype} cannot be made a tensor: convert it to numbers. {NUMBERED}"
    kinds = [np.asarray(x.iloc[:, i]).dtype.kind for i in range(array.shape[1])]
    words = [repr(name) for name, kind in zip(x.columns, kinds, strict=True) if kind not in "biuf"]
    if not words:  # such as those of pandas.get_dummies beside numbers
        found = ", ".join(sorted({str(kind) for kind in x.dtypes}))
        return f"A table with columns of {found} cannot be made one tensor: pass table.astype('float32')."
    first = ", ".join(words[:4]) + ", ..." * (len(words) > 4)
    return f"Columns of the table hold no numbers ({first}): encode or drop them as for the training of the network."


def is_array(x: Any) -> bool:
    """Whether something is a tensor or an array, also of pandas."""
    return isinstance(x, Tensor) or (hasattr(x, "__array__") and getattr(x, "ndim", 0) > 0)


def as_tensors(x: Any, dtype: torch.dtype | None) -> Any:
    """Return an input with tensors in place of arrays; floating-point arrays are converted to ``dtype``."""
    if isinstance(x, Tensor):
        if x.is_nested:
            msg = (
                "The data are a nested tensor, which cannot be cut example by example: pad it, "
                "torch.nested.to_padded_tensor(x, 0.0), and pass the network a mask if it takes one."
            )
            raise DataError(msg)
        return x
    if is_array(x):
        array = np.asarray(x)
        try:
            tensor = torch.from_numpy(np.array(array) if not array.flags.writeable else np.ascontiguousarray(array))
        except TypeError:
            raise DataError(_no_numbers(x, array)) from None
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    if isinstance(x, Mapping):
        return {key: as_tensors(value, dtype) for key, value in x.items()}
    if isinstance(x, (tuple, list)) and any(
        is_array(value) or isinstance(value, (Mapping, tuple, list)) for value in x
    ):
        return tuple(as_tensors(value, dtype) for value in x)
    return x


def first_bad(leaf: Tensor) -> str:
    """Say which example of a tensor with one entry per example is the first that is not finite."""
    if not leaf.ndim:
        return ""
    bad = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1)
    return f", the first at example {int(bad.nonzero()[0])}, counted from 0"


def n_examples(x: Any) -> int:
    """Return the number of examples in an input."""
    lengths = {len(leaf) for leaf in leaves(x) if leaf.ndim}
    if len(lengths) != 1:
        what = f"tensors of different lengths {sorted(lengths)}"
        if not lengths:
            what = f"no tensor (it is {type(x).__name__}): torch.as_tensor makes one of an array or a list"
        msg = f"An input must hold tensors with one entry per example; this one holds {what}."
        raise DataError(msg)
    return lengths.pop()


def ordinary(leaf: Tensor) -> Tensor:
    """Return a tensor that may take part in differentiation: a copy of an inference tensor, else itself."""
    return leaf.clone() if leaf.is_inference() else leaf


def take_examples(x: Any, start: int, stop: int) -> Any:
    """Return some examples of an input; a tensor without dimensions belongs to all of them."""
    return map_leaves(lambda leaf: leaf[start:stop] if leaf.ndim else leaf, x)


def example_dims(x: Any) -> Any:
    """Return ``in_dims`` for ``vmap`` over examples: 0 for tensors with examples, None for what all examples share."""
    if isinstance(x, Mapping):
        return {key: example_dims(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(example_dims(value) for value in x)
    return 0 if isinstance(x, Tensor) and x.ndim else None


def as_batch(x: Any, dims: Any) -> Any:
    """Return one example, as ``vmap`` over ``dims`` passes it, as a batch of one."""
    return map_leaves(lambda leaf, dim: leaf if dim is None else leaf[None], x, dims)


def to_device(x: Any, device: torch.device) -> Any:
    """Move every tensor of an input."""
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), x)


def join_examples(parts: Sequence[Any]) -> Any:
    """Join inputs of the same structure; a tensor without dimensions is taken from the first."""
    return map_leaves(lambda *tensors: torch.cat(tensors) if tensors[0].ndim else tensors[0], *parts)


def split_batch(batch: Any, batch_fn: BatchFn | None, dtype: torch.dtype | None = None) -> tuple[Any, Tensor]:
    """Return inputs and targets of a training batch; floating-point arrays become tensors of type ``dtype``."""
    if batch_fn is not None:
        x, y = _apart(batch, batch_fn)
        return _checked(x, y, dtype)
    if isinstance(batch, Mapping):
        key = _target_key(batch)
        weight = next((k for k in _WEIGHTS if k in batch), None)
        if key is not None and weight is not None:
            msg = (
                f"The batch holds {weight!r}: {_NO_WEIGHTS}. Take them out with batch_fn=lambda batch: "
                f"(inputs, batch[{key!r}]); where {weight!r} is an input of the network, leave it in there."
            )
            raise DataError(msg)
        if key is not None:
            return _checked({k: v for k, v in batch.items() if k != key}, batch[key], dtype)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return _checked(batch[0], batch[1], dtype)
    elif isinstance(batch, (tuple, list)) and len(batch) > 2:
        msg = (
            f"A training batch must be a pair (inputs, targets), not {_named(batch)}. Several inputs: "
            "batch_fn=lambda batch: ((batch[0], batch[1]), batch[2]). Inputs, targets and weights: "
            f"batch_fn=lambda batch: (batch[0], batch[1]), for {_NO_WEIGHTS}."
        )
        raise DataError(msg)
    msg = (
        f"A training batch must be a pair (inputs, targets) or a mapping with 'labels', not {_named(batch)}: "
        "say how to take it apart with batch_fn=lambda batch: (inputs, targets)."
    )
    raise DataError(msg)


def inputs_of(batch: Any, batch_fn: BatchFn | None, wanted: str = "") -> Any:
    """Return the inputs of a batch that may come without targets; ``batch_fn`` is applied to each.

    ``wanted`` describes the training inputs: without ``batch_fn``, a batch of the same form is no pair with targets.
    """
    if batch_fn is not None:
        try:
            x = _apart(batch, batch_fn)[0]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            msg = (
                f"batch_fn failed on a batch of the loader, {type(error).__name__}: {error}. It is applied to every "
                "batch of a loader, with targets or without: let it return (inputs, None) where there are none, or "
                "pass the inputs themselves, predict(x)."
            )
            raise DataError(msg) from error
        if is_array(batch) and n_examples(as_tensors(x, None)) != len(batch):
            msg = (
                f"batch_fn makes other examples of a batch of {len(batch)} inputs without targets: does it take "
                "batch[0] for the inputs? It is applied to every batch of a loader: let it return (batch, None) for a "
                "tensor, or pass the inputs themselves, predict(x)."
            )
            raise DataError(msg)
        return x
    if wanted and places(described(batch)) == places(wanted):
        return batch
    if isinstance(batch, Mapping):
        key = _target_key(batch)
        return batch if key is None else {k: v for k, v in batch.items() if k != key}
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) in (1, 2) else batch


def _apart(batch: Any, batch_fn: BatchFn) -> Sequence[Any]:
    """Return what ``batch_fn`` makes of a batch, if it is a pair."""
    pair = batch_fn(batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        msg = f"batch_fn must return a pair (inputs, targets), not {_named(pair)}."
        raise DataError(msg)
    return pair


def places(description: str) -> list[str]:
    """Return the parts of an input from its description: their places, without shapes and types."""
    return sorted(re.findall(r"inputs(?:\[[^\]]*\])*(?= of )", form(description)))


def same_form(one: str, other: str) -> bool:
    """Whether two descriptions have the same parts; where not both are named, whether they have as many."""
    a, b = places(one), places(other)
    return a == b if "['" in form(one) and "['" in form(other) else len(a) == len(b)


def form(signature: str) -> str:
    """Return the description of shapes and types in a signature, without the names of columns."""
    return signature.partition(_COLUMNS)[0]


def signed(description: str, columns: Sequence[str]) -> str:
    """Return the signature of inputs: their description and, where they came as a table, the names of its columns."""
    return description + (_COLUMNS + json.dumps(list(columns)) if columns else "")


def columns_of(batch: Any) -> list[str]:
    """Return the names of the columns of a table of inputs, alone or in a pair with targets; [] if it has none."""
    table = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    names = list(table.columns) if is_array(table) and hasattr(table, "columns") else []
    return names if all(isinstance(name, str) for name in names) else []  # pandas numbers the columns of an array


def check_columns(batch: Any, signature: str) -> None:
    """Refuse a table whose columns are not those of the training table, in its order; arrays have no names."""
    found, trained = columns_of(batch), json.loads(signature.partition(_COLUMNS)[2] or "[]")
    if not found or not trained or found == trained:
        return
    lacking = [name for name in trained if name not in found]
    what = "the columns of training in another order" if sorted(found) == sorted(trained) else "other columns"
    what = f"no column {lacking[0]!r}" if lacking else what
    names = trained if len(trained) <= _NAMED_COLUMNS else "list(table.columns) of the table that fit was given"
    msg = f"The inputs have {what}, and a network takes columns by position: pass x[columns] with columns = {names}."
    raise DataError(msg + (" If only the names differ, pass x.to_numpy()." if lacking else ""))


def described(x: Any, path: str = "inputs") -> str:
    """Describe shape and type of the tensors of an input, with n for the number of examples."""
    if isinstance(x, Tensor):
        shape = f"({', '.join(('n', *map(str, x.shape[1:])))}{',' * (x.ndim == 1)})" if x.ndim else "()"
        return f"{path} of shape {shape} and type {x.dtype}"
    if isinstance(x, Mapping):
        return ", ".join(described(value, f"{path}[{key!r}]") for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return ", ".join(described(value, f"{path}[{i}]") for i, value in enumerate(x))
    return f"{path} of type {type(x).__name__}"


def layout(x: Any, y: Tensor) -> dict[str, Any]:
    """Return what must be the same in every batch: shapes and types per example, and what all examples share."""
    return dict(_layout(x, "inputs")) | dict(_layout(y, "targets"))


def _layout(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(x, Tensor):
        yield path, (tuple(x.shape[1:]), x.dtype) if x.ndim else (x.item(), x.dtype)
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from _layout(value, f"{path}[{key!r}]")
    elif isinstance(x, (tuple, list)) and (any(True for _ in leaves(x)) or all(v is None for v in x)):
        for i, value in enumerate(x):
            yield from _layout(value, f"{path}[{i}]")
    elif x is None or isinstance(x, (bool, int, float, str)):
        yield path, x
    else:
        msg = (
            f"The batch's {path} is {_named(x)}, which cannot be cut example by example: make it a tensor "
            "(torch.as_tensor), or leave it out with batch_fn=lambda batch: (inputs, targets)."
        )
        raise DataError(msg)


def _checked(x: Any, y: Any, dtype: torch.dtype | None) -> tuple[Any, Tensor]:
    x, y = as_tensors(x, dtype), as_tensors(y, dtype)
    if not isinstance(y, Tensor) or y.ndim == 0:
        msg = (
            f"Targets must be a tensor with one entry per example, not {_named(y)}: torch.as_tensor(targets) makes one "
            "of an array or a list, in the dataset or in batch_fn=lambda batch: (inputs, targets)."
        )
        raise DataError(msg)
    return x, y


def _target_key(batch: Mapping[Any, Any]) -> Any:
    return next((key for key in TARGETS if key in batch), None)


def _named(value: Any) -> str:
    """Describe a value by its type, and its length or shape."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}"
