r"""Rows of few inputs, where the time goes into calls rather than into numbers.

Two ways, for what a small network does with one input or a handful of them:

- *By output*: one input with few outputs has few rows, and each is a backward pass by plain differentiation. There is
  nothing to compare the rows with: they are what others are compared with. The values are compared with another pass.
- *By copies*: every input is repeated once for each output :math:`o`, and one backward pass of
  :math:`\sum_{i,o} f_o(x_{i,o})` over all copies gives what would take a pass for each output. Copies that influence
  each other, or layers that are not what they seem, show where the rows are compared with plain differentiation of the
  inputs themselves.

Where something differs there is no answer, and the caller takes its usual way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nullbayes.jacobian.batches import map_leaves, n_examples
from nullbayes.jacobian.comparison import CHUNK_TOLERANCE, Plain, gradients, ordinary, recording
from nullbayes.jacobian.layers import LayerRows
from nullbayes.jacobian.leaves import Leaves
from nullbayes.linalg.pieces import DensePiece, Piece
from nullbayes.precision import full_precision

_OUTPUTS = 4  # as many backward passes take no longer than copies and a comparison
_ENTRIES = 2**21  # of the rows that are formed by output, whole
_COPIES = 64
_OPERATIONS = 2**25  # of all copies in the forward pass: beyond, numbers take longer than calls


@full_precision()
def form_few(rows: LayerRows, x: Any, y: Tensor) -> tuple[Tensor, list[Piece]] | None:
    """Return the outputs (n, O) for few inputs, and their rows; None where the usual way is faster, or needed."""
    leaves, n = Leaves.of(rows.network), n_examples(x)
    if leaves is None:
        return None
    if n == 1 and rows.width <= _OUTPUTS and rows.width * rows.network.n_parameters <= _ENTRIES:
        return _by_output(leaves, x)
    if n * rows.width <= _COPIES and rows.whole and n * rows.width * rows.operations <= _OPERATIONS:
        return _by_copies(rows, leaves, x, y)
    return None


def _by_output(leaves: Leaves, x: Any) -> tuple[Tensor, list[Piece]] | None:
    with recording():
        x = map_leaves(ordinary, x)
        values = leaves.outputs(x).flatten(1)
        if not values.requires_grad:
            return None
        tensors = list(leaves.tensors)
        parts = [part.reshape(-1) for value in values[0] for part in gradients(value, tensors)]
    with torch.no_grad():
        again = leaves.outputs(x).flatten(1)
    values = values.detach()
    if float((again - values).norm()) > CHUNK_TOLERANCE * float(values.norm()):
        return None
    return values, [DensePiece(torch.cat(parts).view(values.shape[1], -1), 0)]


def _by_copies(rows: LayerRows, leaves: Leaves, x: Any, y: Tensor) -> tuple[Tensor, list[Piece]] | None:
    n, width = len(y), rows.width
    plain = Plain(rows.network, rows.function, x, y, 0, n, leaves)
    with recording():
        copies = map_leaves(lambda leaf: ordinary(leaf).repeat_interleave(width, 0) if leaf.ndim else leaf, x)
        try:
            values, seen = rows.watch(rows.layers, n * width, lambda: leaves.outputs(copies).flatten(1))
            if len(seen) < len(rows.layers) or values.shape != (n * width, width):
                return None
            chosen = torch.eye(width, dtype=values.dtype, device=values.device).repeat(n, 1)
            outputs = [output for _, output in seen.values()]
            found = torch.autograd.grad(values, outputs, chosen, allow_unused=True, materialize_grads=True)
        except Exception:  # a network that takes no batch of this size, or too much memory: there is the usual way
            return None
    pieces: list[Piece] = []
    for layer, (inputs, _), gradient in zip(rows.layers, seen.values(), found, strict=True):
        pieces += layer.pieces(inputs[::width], gradient.unflatten(0, (n, width)))
    values = values.detach()[::width]
    return (plain.values, pieces) if plain.agrees(values, pieces, CHUNK_TOLERANCE) else None
