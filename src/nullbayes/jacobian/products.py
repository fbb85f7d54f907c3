r"""Products with the Jacobian of a function of the flat parameters, for many vectors at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from nullbayes.jacobian.data import map_leaves
from nullbayes.jacobian.network import Network
from nullbayes.types import RowFunction


def push(function: RowFunction, theta: Tensor, x: Any, y: Tensor, vectors: Tensor) -> Tensor:  # (S, P) -> (S, n, O)
    """Return the Jacobian of ``function`` at ``theta`` times each vector, by forward-mode differentiation."""

    def one(vector: Tensor) -> Tensor:
        return jvp(lambda flat: function(flat, x, y), (theta,), (vector,))[1]

    with torch.no_grad():
        return vmap(one, randomness="same")(vectors)


def pull(function: RowFunction, theta: Tensor, x: Any, y: Tensor, weights: Tensor) -> Tensor:  # (S, n, O) -> (S, P)
    """Return each weight times the Jacobian of ``function`` at ``theta``, by reverse-mode differentiation."""
    with torch.no_grad():
        _, backward = vjp(lambda flat: function(flat, x, y), theta)
        return vmap(lambda weight: backward(weight)[0])(weights)


def linearized(network: Network, x: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:  # (n, O), (S, n, O)
    r"""Return :math:`f(\theta, x)` and :math:`J(x)\,v` for each vector."""
    empty = vectors.new_empty(0)
    return network.outputs(x), push(lambda flat, x, y: network(flat, x), network.theta, x, empty, vectors)


def output_rows(network: Network, x: Any) -> Tensor:  # (n, O, P)
    """Return the entries of the Jacobian of the outputs, example by example."""

    def one(flat: Tensor, xi: Any) -> Tensor:
        return network(flat, map_leaves(lambda leaf: leaf[None], xi))[0]

    with torch.no_grad():
        return vmap(jacrev(one), in_dims=(None, 0))(network.theta, x)
