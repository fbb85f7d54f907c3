r"""Products with the Jacobian of a function of the flat parameters, for many vectors at once."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from nullbayes.jacobian.data import as_batch, example_dims
from nullbayes.jacobian.network import Network, differentiable_kernels
from nullbayes.types import RowFunction


def push(function: RowFunction, theta: Tensor, x: Any, y: Tensor, vectors: Tensor) -> Tensor:  # (S, P) -> (S, n, O)
    """Return the Jacobian of ``function`` at ``theta`` times each vector, by forward-mode differentiation."""
    _load_forward_mode()

    def one(vector: Tensor) -> Tensor:
        tangent: Tensor = jvp(lambda flat: function(flat, x, y), (theta,), (vector,))[1]
        return tangent

    with torch.no_grad(), differentiable_kernels():
        return vmap(one, randomness="same")(vectors)


def pull(function: RowFunction, theta: Tensor, x: Any, y: Tensor, weights: Tensor) -> Tensor:  # (S, n, O) -> (S, P)
    """Return each weight times the Jacobian of ``function`` at ``theta``, by reverse-mode differentiation."""
    with torch.no_grad(), differentiable_kernels():
        backward = vjp(lambda flat: function(flat, x, y), theta)[1]
        pulled: Tensor = vmap(lambda weight: backward(weight)[0])(weights)
        return pulled


def linearized(network: Network, x: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:  # (n, O), (S, n, O)
    r"""Return :math:`f(\theta, x)` and :math:`J(x)\,v` for each vector."""
    empty = vectors.new_empty(0)
    return network.outputs(x), push(lambda flat, x, y: network(flat, x), network.theta, x, empty, vectors)


def output_rows(network: Network, x: Any) -> Tensor:  # (n, O, P)
    """Return the entries of the Jacobian of the outputs, example by example."""
    dims = example_dims(x)

    def one(flat: Tensor, xi: Any) -> Tensor:
        return network(flat, as_batch(xi, dims))[0]

    with torch.no_grad(), differentiable_kernels():
        entries: Tensor = vmap(jacrev(one), in_dims=(None, dims))(network.theta, x)
        return entries


@functools.cache
def _load_forward_mode() -> None:
    """Let torch load its forward mode: torch 2.13 warns about itself then, and ``-W error`` would stop the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        one = torch.ones(1, device="cpu")
        jvp(torch.sin, (one,), (one,))
