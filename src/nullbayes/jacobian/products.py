r"""Products with the Jacobian of a function of the flat parameters, for many vectors at once."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import leaves, n_examples, take_examples
from nullbayes.jacobian.few import form_few
from nullbayes.jacobian.network import Network, RowFunction
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.limits import is_out_of_memory
from nullbayes.linalg.held import HeldBlock
from nullbayes.precision import differentiable, full_precision

_COMPARED = 8  # inputs of each prediction whose rows are compared with plain differentiation
_forward_mode = threading.Lock()  # torch has one for the whole process: who leaves it first ends it for all


def push(function: RowFunction, theta: Tensor, x: Any, y: Tensor, vectors: Tensor) -> Tensor:  # (S, P) -> (S, n, O)
    """Return the Jacobian of ``function`` at ``theta`` times each vector, by forward-mode differentiation."""
    _load_forward_mode()

    def one(vector: Tensor) -> Tensor:
        tangent: Tensor = jvp(lambda flat: function(flat, x, y), (theta,), (vector,))[1]
        return tangent

    with _forward_mode, torch.no_grad(), differentiable():
        return vmap(one, randomness="same")(vectors)


def pull(function: RowFunction, theta: Tensor, x: Any, y: Tensor, weights: Tensor) -> Tensor:  # (S, n, O) -> (S, P)
    """Return each weight times the Jacobian of ``function`` at ``theta``, by reverse-mode differentiation."""
    with torch.no_grad(), differentiable():
        backward = vjp(lambda flat: function(flat, x, y), theta)[1]
        pulled: Tensor = vmap(lambda weight: backward(weight)[0])(weights)
        return pulled


def product_examples(device: torch.device, n_vectors: int, most: int = 8192) -> int:
    """Return how many examples to take through products with so many vectors in one go.

    On a CPU what is in work should stay in its cache, on a GPU there should be enough of it; never more than ``most``
    examples times vectors.
    """
    return max(1, min(most, 8192 if device.type == "cuda" else 256) // max(1, n_vectors))


def linearized(network: Network, x: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:  # (n, ...), (S, n, ...)
    r"""Return :math:`f(\theta, x)` and :math:`J(x)\,v` for each vector.

    By forming the rows of :math:`J(x)`, a backward pass an output, or by forward mode, a pass a vector: whichever is
    less work. A row costs about as much as one and a half vectors. Where processes divide the parameters, each has its
    part of the vectors, and all get the sum, and the outputs of the first.
    """
    own, changes = _linearized(network, x, vectors)
    if network.group.size == 1:
        return own, changes
    first = own if network.group.rank == 0 else torch.zeros_like(own)
    total = network.group.sum(torch.cat([first[None], changes]))
    return total[0], total[1:]


def _linearized(network: Network, x: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
    without = False
    if not _rows_are_cheaper(network, x, len(vectors)) and _has_forward_mode(network, x):
        try:
            return _linearized_by_products(network, x, vectors)
        except RuntimeError as error:  # an operation that forward mode does not know; what is wrong else shows below
            if is_out_of_memory(error):
                raise
            without = True
    rows, shape, parts = _layer_rows(network, x), network.output_shape(x), []
    for piece in _in_pieces(x, rows.examples_at_a_time):
        values, block = _block(network, rows, piece)
        changes = block.mv(vectors).view(len(vectors), -1, *shape)
        parts.append((values.view(-1, *shape), changes))
    if without:  # else it was the input that was wrong
        network.forward_mode = False
    return _joined(parts)


def output_rows(network: Network, x: Any, room: int = 0) -> Tensor:  # (n, ..., P)
    """Return the entries of the Jacobian of the outputs, example by example.

    ``room`` are temporary bytes to form them, beside the result and a copy of it; the usual ones where these are more.
    """
    rows = _layer_rows(network, x)
    parts = []
    for piece in _in_pieces(x, max(rows.examples_at_a_time, room // rows.example_bytes)):
        values, block = _block(network, rows, piece)
        parts.append(block.dense().view(len(values), *network.output_shape(x), -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # which copies even one


def rows_are_less_work(n_outputs: int, n_vectors: float) -> bool:
    """Whether forming the rows of an example is less work than multiplying vectors by forward or reverse mode."""
    return 3 * n_outputs <= 2 * n_vectors


def _rows_are_cheaper(network: Network, x: Any, n_vectors: int) -> bool:
    """Whether rows are less work than forward mode, go wholly by layers, and fit in memory."""
    if not rows_are_less_work(math.prod(network.output_shape(x)), n_vectors):
        return False
    rows = _layer_rows(network, x)
    return not rows.rest and rows.fits


def _has_forward_mode(network: Network, x: Any) -> bool:
    """Whether forward mode is right for a network; compared here, once, where no fit did, as after loading a file."""
    if network.forward_mode is None:
        few = take_examples(x, 0, _COMPARED)
        compare_modes(_layer_rows(network, x), few, _no_targets(few), needed=False)
    return bool(network.forward_mode)


def _linearized_by_products(network: Network, x: Any, vectors: Tensor) -> tuple[Tensor, Tensor]:
    empty = vectors.new_empty(0)
    return _joined(
        [
            (network.outputs(piece), push(lambda flat, x, y: network(flat, x), network.theta, piece, empty, vectors))
            for piece in _in_pieces(x, product_examples(network.device, len(vectors)))
        ]
    )


def _layer_rows(network: Network, x: Any) -> RowBuilder:
    """Return how to form rows of the outputs, found out and checked on the first inputs that a network sees."""
    key = ("rows", *(tuple(leaf.shape[1:]) for leaf in leaves(x)))
    with network.lock:
        if key not in network.cache:
            network.cache[key] = RowBuilder(network, _flat_outputs(network), x, _no_targets(x))
        rows: RowBuilder = network.cache[key]
        return rows


def _block(network: Network, rows: RowBuilder, x: Any) -> tuple[Tensor, HeldBlock]:
    """Return the outputs (n, O) for some inputs, and their rows."""
    y = _no_targets(x)
    values, pieces = form_few(rows, x, y) or rows.checked(x, y, few=_COMPARED)
    return values, HeldBlock(tuple(pieces), values.numel(), network.n_parameters, rows.width, network.theta)


def _flat_outputs(network: Network) -> RowFunction:
    return lambda flat, x, y: network(flat, x).flatten(1)


def _no_targets(x: Any) -> Tensor:
    return torch.zeros(n_examples(x), device=next(leaves(x)).device)


def _in_pieces(x: Any, size: int) -> Iterator[Any]:
    for start in range(0, n_examples(x), size):
        yield take_examples(x, start, start + size)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([values for values, _ in parts]), torch.cat([changes for _, changes in parts], dim=1)


@functools.cache
def _load_forward_mode() -> None:
    """Let torch load its forward mode: torch 2.13 warns about itself then, and ``-W error`` would stop the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        one = torch.ones(1, device="cpu")
        jvp(torch.sin, (one,), (one,))


# --- checked products -------------------------------------------------------------------------------------------------


def centred(changes: Tensor) -> Tensor:  # (S, ...)
    """Subtract the mean over the samples, which is Monte Carlo error if the expectation is zero."""
    return changes - changes.mean(0)


@full_precision()
def compare_modes(rows: RowBuilder, x: Any, y: Tensor, *, needed: bool) -> None:
    """Compare a product with the rows of some examples, by reverse mode, with the same by forward mode.

    Where torch has no forward mode for an operation, or a wrong one, predictions are made from rows as well; such a
    network is refused if forward mode is ``needed``. Reverse mode was compared with differences before.
    """
    function, block = rows.probe(x, y)
    theta, why = rows.network.theta, ""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, len(theta), generator=generator, dtype=torch.float64, device="cpu").to(theta)
    try:
        ahead = push(function, theta, x, y, vector).flatten(1)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        why = f"this network has not ({str(error).partition(chr(10))[0]})"
    else:
        back, eps = block.mv(vector), torch.finfo(theta.dtype).eps
        if float((ahead - back).norm()) > eps**0.4 * float(ahead.norm() + back.norm()):
            why = "torch has wrong for this network"
    rows.network.forward_mode = not why
    if why and needed:
        msg = f'storage="matrix_free" needs forward mode, which {why}: use "recompute".'
        raise ModelError(msg)
