"""Rows against plain differentiation: a random combination of them, by one backward pass without any shortcut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import map_leaves, take_examples
from nullbayes.jacobian.leaves import Leaves
from nullbayes.jacobian.network import Network
from nullbayes.linalg.held import HeldBlock
from nullbayes.linalg.pieces import Piece
from nullbayes.types import RowFunction

CHUNK_TOLERANCE = 3e-3  # of many examples together: a ReLU at zero may go either way, by rounding
COUPLED = (
    "Examples alone give other rows than examples together: they influence each other, in the network or in the loss. "
    "Each row must belong to one example: normalize by running statistics, and compare with nothing in the same batch."
)


class Plain:
    """What autograd says of some of the examples of a chunk.

    Parameters
    ----------
    network, function
        What the rows are the derivatives of; see :class:`LayerRows <nullbayes.jacobian.layers.LayerRows>`.
    x, y
        The chunk.
    start, stop : int
        Which of its examples to look at.
    leaves : Leaves, optional
        Evaluates the function at the trained parameters in a cheaper way, where it is the outputs.
    """

    def __init__(
        self,
        network: Network,
        function: RowFunction,
        x: Any,
        y: Tensor,
        start: int,
        stop: int,
        leaves: Leaves | None = None,
    ) -> None:
        self.network, self.function = network, function
        self._x, self._y = take_examples(x, start, stop), y[start:stop]
        self._examples = slice(start, stop)
        found = self._at(network.theta) if leaves is None else self._at_leaves(leaves)
        self.values, self._combined = found  # (n, O), (P,)

    def agrees(self, values: Tensor, pieces: list[Piece], tolerance: float) -> bool:  # (n, O) of the whole chunk
        """Return whether the values and the rows of the chunk are those of plain differentiation."""
        width = self.values.shape[1]
        rows = slice(self._examples.start * width, self._examples.stop * width)
        part = tuple(piece.take(rows) for piece in pieces)
        block = HeldBlock(part, self.values.numel(), self.network.n_parameters, width, self._combined)
        errors = (
            values[self._examples] - self.values,
            block.rmv(_weights(self.values).flatten()[None])[0] - self._combined,
        )
        allowed = [tolerance * float(size.norm()) for size in (self.values, self._combined)]
        if not _exceed(errors, allowed):
            return True
        if _exceed([self._at(self.network.theta)[0] - self.values], allowed[:1]):
            return False  # the network is random: its answers say nothing about rounding
        # near zero a loss is rounding alone: as much as rounded parameters change it
        shifts = [b - a for a, b in zip((self.values, self._combined), self._at(self._rounded()), strict=True)]
        return not _exceed(errors, [30 * float(shift.norm()) + a for shift, a in zip(shifts, allowed, strict=True)])

    def check_alone(self) -> None:
        """Refuse values that are others when an example is alone, for the first, the last and one between."""
        x, y, values = self._x, self._y, self.values
        scale = float(values.abs().max()) + torch.finfo(values.dtype).tiny
        for i in {0, len(y) // 2, len(y) - 1} if len(y) > 1 else ():
            with torch.no_grad():
                alone = self.function(self.network.theta, take_examples(x, i, i + 1), y[i : i + 1])[0]
            apart = float((alone - values[i]).abs().max())
            if apart > 1e3 * torch.finfo(values.dtype).eps ** 0.75 * scale:
                with torch.no_grad():
                    shift = self.function(self._rounded(), x, y) - values
                if apart > 100 * float(shift.abs().max()):
                    raise ModelError(COUPLED)

    def _at(self, parameters: Tensor) -> tuple[Tensor, Tensor]:  # (P,) -> (n, O), (P,)
        """Return the values, and the derivative of their random combination."""
        with recording():
            theta = parameters.clone().requires_grad_()
            values = self.function(theta, *map_leaves(ordinary, (self._x, self._y)))
            return values.detach(), _combination(values, [theta])[0]

    def _at_leaves(self, leaves: Leaves) -> tuple[Tensor, Tensor]:  # (n, O), (P,)
        with recording():
            values = leaves.outputs(map_leaves(ordinary, self._x)).flatten(1)
            parts = _combination(values, list(leaves.tensors))
            return values.detach(), torch.cat([part.reshape(-1) for part in parts])

    def _rounded(self) -> Tensor:
        """Return the parameters, each changed as much as rounding may."""
        theta, generator = self.network.theta, torch.Generator(device="cpu").manual_seed(1)
        signs = torch.randn(len(theta), generator=generator, device="cpu").sign().to(theta)
        return theta * (1 + 4 * torch.finfo(theta.dtype).eps * signs)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record for differentiation, whatever the mode around the call."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def ordinary(leaf: Tensor) -> Tensor:
    """Return a tensor that may take part in differentiation."""
    return leaf.clone() if leaf.is_inference() else leaf


def gradients(value: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Differentiate one number; what it does not depend on has a derivative of zero."""
    if not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    found = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
    return list(found)


def many_gradients(values: Tensor, tensors: list[Tensor], at_once: int) -> list[Tensor]:  # (O, ...) each
    """Differentiate several numbers, as many in one pass as is said."""
    units = torch.eye(len(values), dtype=values.dtype, device=values.device)

    def zeros(tensor: Tensor) -> Tensor:
        return values.new_zeros(len(values), *tensor.shape)

    def one_pass(rows: slice) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            values, tensors, units[rows], retain_graph=True, is_grads_batched=True, allow_unused=True
        )

    if len(values) <= at_once:  # without a second copy of what may be large
        found = one_pass(slice(None))
        return [zeros(tensor) if part is None else part for part, tensor in zip(found, tensors, strict=True)]
    result = [zeros(tensor) for tensor in tensors]
    for start in range(0, len(values), at_once):
        rows = slice(start, start + at_once)
        for whole, part in zip(result, one_pass(rows), strict=True):
            if part is not None:
                whole[rows] = part
    return result


def _combination(values: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Differentiate the random combination of some values."""
    if not values.requires_grad:
        msg = "What rows are to be formed of does not depend on the parameters: look at the loss."
        raise ModelError(msg)
    return gradients((values * _weights(values)).sum(), tensors)


def _weights(values: Tensor) -> Tensor:
    """Return the same random combination for values of the same shape."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(values.shape, generator=generator, device="cpu").to(values)


def _exceed(errors: Sequence[Tensor], sizes: Sequence[float]) -> bool:
    """Whether one of some errors is larger than it may be; NaN is for others to find."""
    return any(float(error.norm()) > size for error, size in zip(errors, sizes, strict=True))
