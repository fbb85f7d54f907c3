"""Outputs and derivatives that are not finite stop a fit where they come up, with the names of the examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import take_examples
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.products import pull, push
from nullbayes.types import RowFunction


def check_outputs(examples: Examples, start: int, outputs: Tensor) -> None:  # (n, ...)
    """Refuse a network that answers NaN or Inf, for the examples from ``start`` on."""
    names = _broken(examples, start, [outputs], len(outputs))
    if names:
        msg = f"The network answers NaN or Inf on {names}: look for extreme inputs there, and for logs and divisions."
        raise ModelError(msg)


def check_rows(examples: Examples, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
    """Refuse NaN and Inf in what was computed for a range of examples, which the first dimension counts."""
    names = _broken(examples, start, tensors, stop - start)
    if names:
        msg = (
            f"The derivatives of the network are NaN or Inf on {names}, where its outputs are finite: look for an "
            "infinite slope, such as that of sqrt, norm or a power at zero (sqrt(x + 1e-12) has none), or for extreme "
            "values."
        )
        raise ModelError(msg)


def push_range(
    function: RowFunction, theta: Tensor, examples: Examples, start: int, stop: int, vectors: Tensor
) -> Tensor:  # (S, P) -> (S, n, O)
    """Multiply the rows of a range of examples with vectors, by forward mode."""
    pushed = push(function, theta, *examples.read(start, stop), vectors)
    if not _seem_finite([pushed]) and torch.isfinite(vectors).all():
        check_rows(examples, start, stop, [pushed.transpose(0, 1)])
    return pushed


def pull_range(
    function: RowFunction, theta: Tensor, examples: Examples, start: int, stop: int, weights: Tensor
) -> Tensor:  # (S, n, O) -> (S, P)
    """Multiply weights with the rows of a range of examples, by reverse mode."""
    x, y = examples.read(start, stop)
    pulled = pull(function, theta, x, y, weights)
    if not _seem_finite([pulled]) and torch.isfinite(weights).all():
        for i in range(stop - start):  # the sum over the examples does not say which
            alone = pull(function, theta, take_examples(x, i, i + 1), y[i : i + 1], weights[:, i : i + 1])
            check_rows(examples, start + i, start + i + 1, [alone[None]])
    return pulled


def _seem_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether the sum of each tensor is finite: one look at each number, and no copy."""
    return bool(torch.isfinite(torch.stack([tensor.sum() for tensor in tensors])).all())


def _broken(examples: Examples, start: int, tensors: Sequence[Tensor], n: int) -> str:
    """Name those of ``n`` examples for which a tensor is not finite; nothing if there are none."""
    if _seem_finite(tensors):
        return ""
    finite = torch.stack([torch.isfinite(tensor).reshape(n, -1).all(1) for tensor in tensors]).all(0)
    return examples.name(start + int(i) for i in (~finite).nonzero()[:, 0])  # none, if but a sum overflowed
