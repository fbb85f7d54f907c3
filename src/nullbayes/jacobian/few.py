r"""Rows of few inputs, where the time goes into calls rather than into numbers.

There are four ways to form the rows of one input, or of a handful of inputs, of a small network:

- *By output*: one input with few outputs has few rows, and each is a backward pass by plain differentiation.
- *At once*: the same passes, mapped over the outputs, for one input whose rows have few entries.
- *By copies*: every input is repeated once per output :math:`o`, and one backward pass of
  :math:`\sum_{i,o} f_o(x_{i,o})` over all copies gives what the layers need to form their rows.
- *Mapped*: one forward pass of the input, and the backward passes to the layers mapped over the outputs. A map costs
  more than a copy per operation, so it pays where the forward passes of the copies would take longer.

The last two rely on each parameter being used by its layer and nowhere else. The graph of every call is checked for
that. Besides, the rows of the first inputs in each way, and of one in 128 inputs later on, are compared with plain
differentiation, which takes as long again: this shows copies that influence each other, and operations that torch maps
wrongly. A way whose rows differ is not taken again; where no other is left, the caller takes its usual one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from nullbayes.jacobian.batches import map_leaves, n_examples, ordinary
from nullbayes.jacobian.checks import CHUNK_TOLERANCE, AutogradReference
from nullbayes.jacobian.network import Leaves
from nullbayes.jacobian.routes import gradients, many_gradients
from nullbayes.jacobian.row_builder import RowBuilder
from nullbayes.linalg.compact import TablePiece
from nullbayes.linalg.pieces import DensePiece, Piece
from nullbayes.precision import full_precision, recording

_OUTPUTS = 4  # as many backward passes take no longer than copies
_ENTRIES = 2**21  # of the rows that are formed by output, whole
_AT_ONCE = 400_000  # of those of many outputs that are formed at once: beyond, copies of layers' inputs are faster
_CONVOLUTIONS = 2**18  # operations of a forward pass up to which convolutions are mapped, too
_SPARSE = 4  # lines of a table for each one that an input takes, from which on it is worth looking them up
_COPIES = 64
_FORWARD = 2**22  # operations of the forward passes of all copies, up to which copies are faster than maps
_OPERATIONS = 2**25  # of all copies in the forward pass: beyond, numbers take longer than calls
_FIRST, _ONE_IN = 32, 128  # inputs that are compared: all of the first, then less than one in a hundred


@full_precision()
def form_few(rows: RowBuilder, x: Any, y: Tensor) -> tuple[Tensor, list[Piece]] | None:
    """Return the outputs (n, O) for few inputs, and their rows; None where the usual way is faster, or needed."""
    leaves, n = Leaves.of(rows.network), n_examples(x)
    way = None if leaves is None else _way(rows, n)
    if leaves is None or way is None:
        return None
    if way in ("at once", "by output"):
        found = _at_once(rows, leaves, x) if way == "at once" else _by_output(leaves, x)
    else:
        found = _by_layers(rows, leaves, x, n, copied=way == "by copies")
    if found is None or not rows.is_due(way, n, _FIRST, _ONE_IN):
        return found
    plain = AutogradReference(rows.network, rows.function, x, y, 0, n, leaves)
    if plain.agrees(*found, CHUNK_TOLERANCE):
        return found
    rows.reasons[way] = "its rows differ from those of plain differentiation"
    return None


def _way(rows: RowBuilder, n: int) -> str | None:
    """Return the fastest way for so many inputs among those that have not failed yet; None for the usual one."""
    width, entries = rows.width, rows.width * rows.network.n_parameters
    failed, at_once = rows.reasons, _ENTRIES if width <= _OUTPUTS else _AT_ONCE
    if n == 1 and width > 1 and entries <= at_once and "at once" not in failed and _maps_well(rows):
        return "at once"
    if n == 1 and width <= _OUTPUTS and entries <= _ENTRIES and "by output" not in failed:
        return "by output"
    if not rows.whole or n * width > _COPIES:
        return None
    if n == 1 and width > 1 and rows.fits and width * rows.operations > _FORWARD:
        return None if "mapped" in failed else "mapped"
    return "by copies" if n * width * rows.operations <= _OPERATIONS and "by copies" not in failed else None


def _maps_well(rows: RowBuilder) -> bool:
    """Whether mapping over outputs is no slower than copies: convolutions become grouped ones, which are slow."""
    return rows.operations <= _CONVOLUTIONS or not any(isinstance(layer.module, _ConvNd) for layer in rows.layers)


def _at_once(rows: RowBuilder, leaves: Leaves, x: Any) -> tuple[Tensor, list[Piece]] | None:
    with recording():
        values = leaves.outputs(map_leaves(ordinary, x)).flatten(1)
        if not values.requires_grad:
            return None
        try:
            found = many_gradients(values[0], list(leaves.tensors), rows.width)
        except Exception as error:  # an operation whose derivative torch cannot map: there are other ways
            rows.reasons["at once"] = str(error)
            return None
    return values.detach(), _pieces(leaves, found, rows.width)


def _by_output(leaves: Leaves, x: Any) -> tuple[Tensor, list[Piece]] | None:
    with recording():
        values = leaves.outputs(map_leaves(ordinary, x)).flatten(1)
        if not values.requires_grad:
            return None
        found = zip(*(gradients(value, list(leaves.tensors)) for value in values[0]), strict=True)
    return values.detach(), _pieces(leaves, map(torch.stack, found), values.shape[1])


def _pieces(leaves: Leaves, found: Iterable[Tensor], width: int) -> list[Piece]:  # (O, *shape) each
    """Return the rows of one input from its gradients; of a table of embeddings, the lines that it took."""
    pieces: list[Piece] = []
    dense: list[Tensor] = []
    start = column = 0  # of what is dense, and of the next gradient
    for part, is_table in zip(found, leaves.are_tables, strict=True):
        lines = part.abs().amax((0, 2)).nonzero()[:, 0] if is_table else None
        if lines is not None and _SPARSE * len(lines) < part.shape[1]:
            pieces += [DensePiece(torch.cat(dense, 1), start)] if dense else []
            pieces.append(TablePiece(lines[None], part[None, :, lines], part.shape[1], column))
            dense, start = [], column + part[0].numel()
        else:
            dense.append(part.reshape(width, -1))
        column += part[0].numel()
    return [*pieces, DensePiece(torch.cat(dense, 1), start)] if dense else pieces


def _by_layers(rows: RowBuilder, leaves: Leaves, x: Any, n: int, *, copied: bool) -> tuple[Tensor, list[Piece]] | None:
    width, times = rows.width, rows.width if copied else 1
    with recording():
        inputs = map_leaves(lambda leaf: _repeated(ordinary(leaf), times), x)
        try:
            values, seen = rows.watch(n * times, lambda: leaves.outputs(inputs).flatten(1))
            if len(seen) < len(rows.layers) or values.shape != (n * times, width) or not _used_once(values, leaves):
                return None
            outputs = [output for _, output in seen.values()]
            if copied:
                own = values.view(n, width, width).diagonal(dim1=1, dim2=2).sum()  # of every copy its own output
                found = torch.autograd.grad(own, outputs, allow_unused=True, materialize_grads=True)
                gradients = [part.unflatten(0, (n, width)) for part in found]
            else:
                gradients = [part.transpose(0, 1) for part in many_gradients(values[0], outputs, width)]
        except Exception:  # a batch of this size, a map or the memory is too much for the network: take the usual way
            return None
    pieces: list[Piece] = []
    for layer, (seen_inputs, _), gradient in zip(rows.layers, seen.values(), gradients, strict=True):
        pieces += layer.pieces(seen_inputs[::times], gradient)
    return values.detach()[::times], pieces


def _repeated(leaf: Tensor, times: int) -> Tensor:  # (n, ...) -> (n * times, ...)
    """Repeat each example, without a copy where there is one example."""
    return leaf[:, None].expand(-1, times, *leaf.shape[1:]).flatten(0, 1) if leaf.ndim else leaf


def _used_once(values: Tensor, leaves: Leaves) -> bool:
    """Whether the graph of some values leads to no parameter by more than one way: its layer's own."""
    known, reached = {id(tensor) for tensor in leaves.tensors}, set[int]()
    seen, waiting = set[Any](), [values.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in () if node is None else node.next_functions:
            if following is None or following in seen:
                continue
            if not hasattr(following, "variable"):
                seen.add(following)
                waiting.append(following)
            elif (leaf := id(following.variable)) in known:
                if leaf in reached:
                    return False
                reached.add(leaf)
    return True
