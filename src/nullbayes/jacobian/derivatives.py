"""What autograd says of a network, compared with its own outputs: what is hidden would count as freedom."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import map_leaves
from nullbayes.jacobian.network import Network
from nullbayes.precision import full_precision

_DIRECTIONS = 3
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-2}
_WIDENED = 10**8  # parameters of a network that may be copied in float64


@full_precision()
def check_derivatives(network: Network, x: Any) -> None:
    """Refuse a network whose derivatives are not those of its outputs, on some examples.

    Parameters that the network uses behind the back of ``functional_call`` (a tensor kept in a list, a hook that holds
    a layer) are named; what ``detach``, ``torch.no_grad`` or a backward of one's own hide shows in the differences of
    the outputs along a few directions, in float64 where the network can be taken there. A kink, or steps of different
    length that disagree, are no evidence.
    """
    _, _, used = _gradient(network, x)
    if used:
        msg = (
            f"The model uses {used[0]!r} by another way than as its own attribute (a list or a hook that holds the "
            "tensor, a forward that was replaced?), so that it cannot be varied: use it by its name, or leave it out "
            "with parameters=... or requires_grad_(False)."
        )
        raise ModelError(msg)
    network, x = _in_double(network, x)
    gradient, weights, _ = _gradient(network, x)
    generator = torch.Generator(device="cpu").manual_seed(1)
    if sum(_disagrees(network, x, weights, gradient, generator) for _ in range(_DIRECTIONS)) > 1:
        msg = (
            "The outputs change with the parameters in another way than their derivatives say: part of the network is "
            "hidden by detach(), torch.no_grad(), rounding or a backward of its own. Leave its parameters out with "
            "parameters=... or requires_grad_(False), or run it with gradients."
        )
        raise ModelError(msg)


def _gradient(network: Network, x: Any) -> tuple[Tensor, Tensor, list[str]]:
    """Return the gradient of a random combination of the outputs, its weights, and parameters used in another way."""
    with torch.inference_mode(False), torch.enable_grad():
        theta = network.theta.clone().requires_grad_()
        values = network(theta, x)
        if not values.requires_grad:
            msg = (
                "The outputs do not depend on the parameters in a way that can be differentiated: is there a detach(), "
                "or torch.no_grad(), in the model or in output_fn? Take it out."
            )
            raise ModelError(msg)
        generator = torch.Generator(device="cpu").manual_seed(0)
        weights = torch.randn(values.shape, generator=generator, device="cpu").to(values)
        named = {name: p for name, p in network.model.named_parameters() if name in network.names and p.requires_grad}
        found = torch.autograd.grad((values * weights).sum(), [theta, *named.values()], allow_unused=True)
    gradient = torch.zeros_like(theta) if found[0] is None else found[0]
    return gradient.detach(), weights, [name for name, g in zip(named, found[1:], strict=True) if g is not None]


def _in_double(network: Network, x: Any) -> tuple[Network, Any]:
    """Return the network and its inputs in float64, where differences have more digits; as they are if it cannot."""
    if network.dtype == torch.float64 or network.n_parameters > _WIDENED:
        return network, x
    names = set(network.names)
    try:
        wide = Network(copy.deepcopy(network.module).double(), lambda name, _: name in names, network.output_fn)
        wide_x = map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)
        wide.outputs(wide_x)
    except Exception:  # whatever a network may do that is made for one precision
        return network, x
    return wide, wide_x


@torch.no_grad()
def _disagrees(network: Network, x: Any, weights: Tensor, gradient: Tensor, generator: torch.Generator) -> bool:
    """Whether the outputs change along a random direction otherwise than the gradient says."""
    theta = network.theta
    vector = torch.randn(len(theta), generator=generator, dtype=torch.float64, device="cpu").to(theta)
    expected = float(gradient.double() @ vector.double())
    unit = torch.finfo(theta.dtype).eps ** (1 / 3) * (1 + float(theta.norm())) / float(vector.norm())
    middle, slopes, kinks = network(theta, x).double(), [], []
    for length in (unit, unit / 4):
        ahead = network(theta + length * vector, x).double() - middle
        behind = middle - network(theta - length * vector, x).double()
        slopes.append(float(((ahead + behind) * weights).sum()) / (2 * length))
        kinks.append(float(((ahead - behind) * weights).abs().sum()) / length)
    far, near = slopes
    if abs(far - near) > 0.1 * abs(near):  # steps too long to say anything
        return False
    kink = max(0.0, (4 * kinks[1] - kinks[0]) / 3)  # curvature shrinks with the step, a kink does not
    allowed = 10 * abs(far - near) + 10 * kink + _TOLERANCE[theta.dtype] * (abs(near) + abs(expected))
    return bool(abs(near - expected) > allowed + torch.finfo(theta.dtype).tiny)
