"""Checks of a network and of its rows, before anything is built on them.

- :func:`check_examples`: answers must not be random, nor depend on the other examples.
- :func:`check_derivatives`: autograd against differences of the outputs. A parameter that is hidden from autograd would
  wrongly look free to vary.
- :func:`check_loss`: the same for a loss of a user's own.
- :class:`AutogradReference`: rows against plain differentiation, by one random combination and one backward pass.
- :func:`check_outputs`, :func:`check_rows`: NaN and Inf, with the names of the examples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import map_leaves, n_examples, ordinary, take_examples
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.modules import HALF
from nullbayes.jacobian.network import Leaves, Network, RowFunction
from nullbayes.jacobian.routes import gradients
from nullbayes.linalg.held import HeldBlock
from nullbayes.linalg.pieces import Piece
from nullbayes.precision import differentiable, full_precision, recording

CHUNK_TOLERANCE = 3e-3  # of many examples together: rounding decides which way a ReLU at zero goes
COUPLED = (
    "Examples alone give other rows than examples together: they influence each other, in the network or in the loss. "
    "Each row must belong to one example: normalize by running statistics, and compare with nothing in the same batch."
)
_NO_ROWS = "What rows are to be formed of does not depend on the parameters: look at the loss."
_Function = Callable[[Network, Tensor, Any], Tensor]  # of a network, its parameters and data -> (n, ...)
_DIRECTIONS = 3
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-2}
SHIFTS = 30  # times what rounded parameters change is still rounding
_COPIED = 10**8  # parameters up to which a network is copied in float64


@full_precision()
def check_examples(network: Network, x: Any) -> None:
    """Refuse a network whose answer is random or depends on the other examples.

    What differs is compared with the spread of each output over the examples, not with the outputs themselves: a large
    offset that all examples share would hide it.
    """
    outputs, again = network.outputs(x), network.outputs(x)
    n = n_examples(x)
    if len(outputs) != n:
        msg = (
            f"The outputs for {n} examples have shape {tuple(outputs.shape)}: examples must come first. "
            "Bring them there with output_fn=lambda returned: ..."
        )
        raise ModelError(msg)
    allowed = _rounding(outputs)
    if ((outputs - again).abs() > allowed).any():
        msg = (
            "The network answers differently when asked twice, even in evaluation mode: something in it is random "
            "(dropout called with training=True?). Make it deterministic in eval mode."
        )
        raise ModelError(msg)
    if len(outputs) > 1:
        alone = network.outputs(take_examples(x, 0, 1))
        if alone.shape != outputs[:1].shape:
            msg = (
                f"The outputs for {n} examples have shape {tuple(outputs.shape)}, those for one alone "
                f"{tuple(alone.shape)}. If the network ends in squeeze(), it takes the dimension of one example away: "
                "write squeeze(-1)."
            )
            raise ModelError(msg)
        if ((apart := (alone - outputs[:1]).abs()) > allowed).any() and _is_more_than_rounding(
            apart, allowed, lambda theta: network.whole(theta, x), network.whole, outputs
        ):
            msg = (
                "The answer for an example depends on the other examples in its batch (normalization by batch "
                "statistics?). Each row must belong to one example: use running statistics, GroupNorm or LayerNorm."
            )
            raise ModelError(msg)


def _rounding(values: Tensor) -> Tensor:  # (n, ...) -> (...) or (), to be compared with differences
    """Return how much values may differ by rounding: part of their spread over examples, and a few eps of their size.

    Outputs have units of their own; positions of a sequence have not, and some may be the same for all examples.
    """
    spread = values.amax(0) - values.amin(0)
    if values.ndim > 2:
        spread = spread.max()
    eps = torch.finfo(values.dtype).eps
    half = next((kind for kind in HALF if torch.equal(values.to(kind).to(values.dtype), values)), None)
    units = 16 * eps if half is None else 2 * torch.finfo(half).eps  # some networks compute in half precision
    allowed: Tensor = 1e3 * eps**0.75 * spread + units * values.abs().max() + torch.finfo(values.dtype).tiny
    return allowed


def _is_more_than_rounding(
    apart: Tensor, allowed: Tensor, function: Callable[[Tensor], Tensor], network: Network, values: Tensor
) -> bool:
    """Whether an example differs by more than rounded parameters change the values: what nearly cancels is rounding."""
    with torch.no_grad(), differentiable():
        shift = (function(rounded_parameters(network)) - values).abs().amax(0)
    return bool((apart > allowed.maximum(SHIFTS * shift)).any())


def rounded_parameters(network: Network) -> Tensor:  # (P,)
    """Return the parameters, each changed as much as rounding may change it."""
    theta, generator = network.theta, torch.Generator(device="cpu").manual_seed(1)
    signs = torch.randn(len(theta), generator=generator, device="cpu").sign().to(theta)
    return theta * (1 + 4 * torch.finfo(theta.dtype).eps * signs)


# --- derivatives against differences ----------------------------------------------------------------------------------


@full_precision()
def check_derivatives(network: Network, x: Any) -> None:
    """Refuse a network whose derivatives are not those of its outputs, on some examples.

    Parameters that the network uses without ``functional_call`` noticing (a tensor kept in a list, a hook that holds
    a layer) are named. What ``detach``, ``torch.no_grad`` or a custom backward hide shows in the differences of the
    outputs along a few directions, in float64 if the network can be converted. A kink, or steps of different length
    that disagree, prove nothing.
    """
    _, _, used = _gradient(network, x, _outputs)
    if used:
        msg = (
            f"The model uses {used[0]!r} by another way than as its own attribute (a list or a hook that holds the "
            "tensor, a forward that was replaced?), so that it cannot be varied: use it by its name, or leave it out "
            "with parameters=... or requires_grad_(False)."
        )
        raise ModelError(msg)
    if _differ_from_differences(network, x, _outputs):
        msg = (
            "The outputs change with the parameters in another way than their derivatives say: part of the network is "
            "hidden by detach(), torch.no_grad(), rounding or a backward of its own. Leave its parameters out with "
            "parameters=... or requires_grad_(False), or run it with gradients."
        )
        raise ModelError(msg)


@full_precision()
def check_loss(network: Network, loss: Callable[[Tensor, Tensor], Tensor], x: Any, y: Tensor) -> None:
    """Refuse a user's loss ``(outputs, targets) -> (n,)`` whose derivatives are not those of its values."""

    def losses(network: Network, theta: Tensor, data: Any) -> Tensor:  # (n, 1)
        return loss(network(theta, data[0]), data[1])[:, None]

    with recording():
        if not losses(network, network.theta.clone().requires_grad_(), (x, y)).requires_grad:
            raise ModelError(_NO_ROWS)
    if _differ_from_differences(network, (x, y), losses):
        msg = (
            "The losses change with the parameters in another way than their derivatives say: part of the loss is "
            "hidden by detach(), torch.no_grad(), rounding or a backward of its own, and would not be held. Take that "
            "out of the loss, or use ProjectedPosterior, which holds the outputs."
        )
        raise ModelError(msg)


def _outputs(network: Network, theta: Tensor, x: Any) -> Tensor:  # (n, ...)
    return network(theta, x)


def _differ_from_differences(network: Network, x: Any, function: _Function) -> bool:
    """Whether the derivatives of a function of a network and its data are not those of its values."""
    network, x = _in_double(network, x, function)
    gradient, weights, _ = _gradient(network, x, function)
    generator = torch.Generator(device="cpu").manual_seed(1)
    found = 0
    for left in reversed(range(_DIRECTIONS)):  # one may be a coincidence; until it is decided
        found += _disagrees(network, x, function, weights, gradient, generator)
        if found > 1 or found + left <= 1:
            break
    return found > 1


def _gradient(network: Network, x: Any, function: _Function) -> tuple[Tensor, Tensor, list[str]]:
    """Return the gradient of a random combination of the values, its weights, and parameters used in another way."""
    with recording():
        theta = network.theta.clone().requires_grad_()
        values = function(network, theta, x)
        if not values.requires_grad:
            msg = (
                "The outputs do not depend on the parameters in a way that can be differentiated: is there a detach(), "
                "or torch.no_grad(), in the model or in output_fn? Take it out."
            )
            raise ModelError(msg)
        weights = _weights(values)
        named = {name: p for name, p in network.model.named_parameters() if name in network.names and p.requires_grad}
        found = torch.autograd.grad((values * weights).sum(), [theta, *named.values()], allow_unused=True)
    gradient = torch.zeros_like(theta) if found[0] is None else found[0]
    return gradient.detach(), weights, [name for name, g in zip(named, found[1:], strict=True) if g is not None]


def _in_double(network: Network, x: Any, function: _Function) -> tuple[Network, Any]:
    """Return the network and its inputs in float64, where differences have more digits; as they are if it cannot."""
    if network.dtype == torch.float64 or network.n_parameters > _COPIED:
        return network, x
    names = set(network.names)
    try:
        wide = Network(copy.deepcopy(network.module).double(), lambda name, _: name in names, network.output_fn)
        wide_x = map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)
        with torch.no_grad():
            function(wide, wide.theta, wide_x)
    except Exception:  # a network that is made for one precision may raise anything
        return network, x
    return wide, wide_x


@torch.no_grad()
def _disagrees(
    network: Network, x: Any, function: _Function, weights: Tensor, gradient: Tensor, generator: torch.Generator
) -> bool:
    """Whether the values change along a random direction in another way than the gradient says."""
    theta = network.theta
    vector = torch.randn(len(theta), generator=generator, dtype=torch.float64, device="cpu").to(theta)
    expected = float(gradient.double() @ vector.double())
    unit = torch.finfo(theta.dtype).eps ** (1 / 3) * (1 + float(theta.norm())) / float(vector.norm())
    middle, slopes, kinks = function(network, theta, x).double(), [], []
    for length in (unit, unit / 4):
        ahead = function(network, theta + length * vector, x).double() - middle
        behind = middle - function(network, theta - length * vector, x).double()
        slopes.append(float(((ahead + behind) * weights).sum()) / (2 * length))
        kinks.append(float(((ahead - behind) * weights).abs().sum()) / length)
    far, near = slopes
    if abs(far - near) > 0.1 * abs(near):  # the steps are too long to prove anything
        return False
    kink = max(0.0, (4 * kinks[1] - kinks[0]) / 3)  # curvature shrinks with the step, a kink does not
    allowed = 10 * abs(far - near) + 10 * kink + _TOLERANCE[theta.dtype] * (abs(near) + abs(expected))
    return bool(abs(near - expected) > allowed + torch.finfo(theta.dtype).tiny)


# --- rows against autograd --------------------------------------------------------------------------------------------


class AutogradReference:
    """The values of examples ``start`` to ``stop`` of a chunk, and a random combination of their rows, by autograd.

    ``leaves`` evaluates the network at less cost, where the function is its outputs.
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
        allowed = [self._allowed(values, tolerance), tolerance * float(self._combined.norm())]
        if not _exceed(errors, allowed):
            return True
        if _exceed([self._at(self.network.theta)[0] - self.values], allowed[:1]):
            return False  # the network is random, so that its answers say nothing about rounding
        # a loss near zero is all rounding: it may differ as much as rounded parameters change it
        shifts = [
            b - a
            for a, b in zip((self.values, self._combined), self._at(rounded_parameters(self.network)), strict=True)
        ]
        return not _exceed(errors, [SHIFTS * float(shift.norm()) + a for shift, a in zip(shifts, allowed, strict=True)])

    def _allowed(self, values: Tensor, tolerance: float) -> float:  # (n, O) of the whole chunk
        """Return how far the values may be apart: part of their spread over the chunk, and a few eps of their size."""
        if len(values) == 1:  # which has no other example to depend on
            return tolerance * float(self.values.norm())
        spread = float((values - values.mean(0)).norm()) * math.sqrt(len(self.values) / len(values))
        return tolerance * spread + 16 * float(torch.finfo(values.dtype).eps) * float(self.values.norm())

    def check_alone(self) -> None:
        """Refuse values that change when an example is alone, for the first, the last and the middle one."""
        x, y, values = self._x, self._y, self.values
        for i in {0, len(y) // 2, len(y) - 1} if len(y) > 1 else ():
            with torch.no_grad():
                alone = self.function(self.network.theta, take_examples(x, i, i + 1), y[i : i + 1])[0]
            apart, allowed = (alone - values[i]).abs(), _rounding(values)
            if (apart > allowed).any() and _is_more_than_rounding(
                apart, allowed, lambda theta: self.function(theta, x, y), self.network, values
            ):
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


def _combination(values: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Differentiate the random combination of some values."""
    if not values.requires_grad:
        raise ModelError(_NO_ROWS)
    return gradients((values * _weights(values)).sum(), tensors)


def _weights(values: Tensor) -> Tensor:
    """Return the same random weights for values of the same shape."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return torch.randn(values.shape, generator=generator, device="cpu").to(values)


def _exceed(errors: Sequence[Tensor], sizes: Sequence[float]) -> bool:
    """Whether one of some errors is larger than allowed. NaN is not: other checks report it."""
    return any(float(error.norm()) > size for error, size in zip(errors, sizes, strict=True))


# --- numbers that are not finite --------------------------------------------------------------------------------------


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


def seem_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether the sum of each tensor is finite, which takes one look at each number and no copy."""
    return bool(torch.isfinite(torch.stack([tensor.sum() for tensor in tensors])).all())


def _broken(examples: Examples, start: int, tensors: Sequence[Tensor], n: int) -> str:
    """Name those of ``n`` examples for which a tensor is not finite. Empty if only the sum overflowed."""
    if seem_finite(tensors):
        return ""
    finite = torch.stack([torch.isfinite(tensor).reshape(n, -1).all(1) for tensor in tensors]).all(0)
    return examples.name(start + int(i) for i in (~finite).nonzero()[:, 0])
