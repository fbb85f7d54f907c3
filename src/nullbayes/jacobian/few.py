r"""Rows of few inputs, where the time goes into calls rather than into numbers.

Three ways, for what a small network does with one input or a handful of them:

- *By output*: one input with few outputs has few rows, and each is a backward pass by plain differentiation.
- *At once*: the same passes, mapped over the outputs; for one input, as long as its rows have few entries.
- *By copies*: every input is repeated once for each output :math:`o`, and one backward pass of
  :math:`\sum_{i,o} f_o(x_{i,o})` over all copies gives what would take a pass for each output.

Rows by copies are right where each parameter is used by its layer and nowhere else: that is read off the graph of
every call. Rows of the first inputs in each way, and of one in sixteen later on, are compared with plain
differentiation of the inputs themselves as well: copies that influence each other show there, and operations that torch
maps wrongly. Where something differs there is no answer, and the caller takes its usual way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from nullbayes.jacobian.autograd import gradients, ordinary, recording
from nullbayes.jacobian.batches import map_leaves, n_examples
from nullbayes.jacobian.checks import CHUNK_TOLERANCE, AutogradReference
from nullbayes.jacobian.leaves import Leaves
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.linalg.pieces import DensePiece, Piece
from nullbayes.precision import full_precision

_OUTPUTS = 4  # as many backward passes take no longer than copies
_ENTRIES = 2**21  # of the rows that are formed by output, whole
_AT_ONCE = 400_000  # of those that are formed at once: beyond, copies of layers' inputs are less to write
_CONVOLUTIONS = 2**18  # operations of a forward pass up to which convolutions are mapped, too
_COPIES = 64
_OPERATIONS = 2**25  # of all copies in the forward pass: beyond, numbers take longer than calls
_FIRST, _ONE_IN = 32, 16  # inputs that are compared: all of the first, then one in so many


@full_precision()
def form_few(rows: RowBuilder, x: Any, y: Tensor) -> tuple[Tensor, list[Piece]] | None:
    """Return the outputs (n, O) for few inputs, and their rows; None where the usual way is faster, or needed."""
    leaves, n, entries = Leaves.of(rows.network), n_examples(x), rows.width * rows.network.n_parameters
    if leaves is None:
        return None
    if n == 1 and rows.width > 1 and entries <= _AT_ONCE and "at once" not in rows.reasons and _maps_well(rows):
        way, found = "at once", _at_once(rows, leaves, x)
    elif n == 1 and rows.width <= _OUTPUTS and entries <= _ENTRIES:
        way, found = "by output", _by_output(leaves, x)
    elif n * rows.width <= _COPIES and rows.whole and n * rows.width * rows.operations <= _OPERATIONS:
        way, found = "by copies", _by_copies(rows, leaves, x, y)
    else:
        return None
    if found is None or not rows.is_due(way, n, _FIRST, _ONE_IN):
        return found
    plain = AutogradReference(rows.network, rows.function, x, y, 0, n, leaves)
    return found if plain.agrees(*found, CHUNK_TOLERANCE) else None


def _maps_well(rows: RowBuilder) -> bool:
    """Whether mapping over outputs is no slower than copies: convolutions become grouped ones, which are slow."""
    return rows.operations <= _CONVOLUTIONS or not any(isinstance(layer.module, _ConvNd) for layer in rows.layers)


def _at_once(rows: RowBuilder, leaves: Leaves, x: Any) -> tuple[Tensor, list[Piece]] | None:
    with recording():
        values = leaves.outputs(map_leaves(ordinary, x)).flatten(1)
        if not values.requires_grad:
            return None
        units = torch.eye(rows.width, dtype=values.dtype, device=values.device)
        try:
            found = torch.autograd.grad(
                values[0], leaves.tensors, units, is_grads_batched=True, allow_unused=True, materialize_grads=True
            )
        except Exception as error:  # an operation whose derivative torch cannot map: there are other ways
            rows.reasons["at once"] = str(error)
            return None
    return values.detach(), [DensePiece(torch.cat([part.reshape(rows.width, -1) for part in found], 1), 0)]


def _by_output(leaves: Leaves, x: Any) -> tuple[Tensor, list[Piece]] | None:
    with recording():
        values = leaves.outputs(map_leaves(ordinary, x)).flatten(1)
        if not values.requires_grad:
            return None
        tensors = list(leaves.tensors)
        parts = [part.reshape(-1) for value in values[0] for part in gradients(value, tensors)]
    return values.detach(), [DensePiece(torch.cat(parts).view(values.shape[1], -1), 0)]


def _by_copies(rows: RowBuilder, leaves: Leaves, x: Any, y: Tensor) -> tuple[Tensor, list[Piece]] | None:
    n, width = len(y), rows.width
    with recording():
        copies = map_leaves(lambda leaf: ordinary(leaf).repeat_interleave(width, 0) if leaf.ndim else leaf, x)
        try:
            values, seen = rows.watch(n * width, lambda: leaves.outputs(copies).flatten(1))
            if len(seen) < len(rows.layers) or values.shape != (n * width, width) or not _used_once(values, leaves):
                return None
            chosen = torch.eye(width, dtype=values.dtype, device=values.device).repeat(n, 1)
            outputs = [output for _, output in seen.values()]
            found = torch.autograd.grad(values, outputs, chosen, allow_unused=True, materialize_grads=True)
        except Exception:  # a network that takes no batch of this size, or too much memory: there is the usual way
            return None
    pieces: list[Piece] = []
    for layer, (inputs, _), gradient in zip(rows.layers, seen.values(), found, strict=True):
        pieces += layer.pieces(inputs[::width], gradient.unflatten(0, (n, width)))
    return values.detach()[::width], pieces


def _used_once(values: Tensor, leaves: Leaves) -> bool:
    """Whether the graph of some values leads to no parameter by more than one way: its layer's own."""
    known, reached = {id(tensor) for tensor in leaves.tensors}, set[int]()
    seen, waiting = set[Any](), [values.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        for following, _ in node.next_functions:
            leaf = id(getattr(following, "variable", None))
            if leaf in known:
                if leaf in reached:
                    return False
                reached.add(leaf)
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return True
