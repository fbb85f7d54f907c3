"""Which columns of the inputs are looked up in which table of embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.jacobian.batches import leaves, take_examples
from nullbayes.jacobian.network import Network

_FEW = 32  # examples: columns of different meaning are not equal in all of them by chance
_MOST_COMPARED = 2**24  # pairs of entries
_TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Lookup:
    """Columns of a tensor of the inputs that are looked up in one table.

    Attributes
    ----------
    leaf : int
        The number of the tensor among the tensors of the inputs.
    columns : Tensor (k,)
        The numbers of the columns, once the tensor is flattened to a row per example.
    lines : int
        The lines of the table, which are numbered from 0.
    """

    leaf: int
    columns: Tensor
    lines: int


def find_lookups(network: Network, x: Any) -> list[Lookup]:
    """Return the columns of whole numbers that go into tables of embeddings as they are.

    Columns that are the same for every example, such as a token that begins each sentence, are left out: they cannot be
    told from others that mean something else. A column that goes into several tables counts for the smallest of them.

    Parameters
    ----------
    network : Network
        The trained network.
    x : Tensor, tuple or mapping of tensors
        Inputs, of which the first few are used.
    """
    few = take_examples(x, 0, _FEW)
    whole = {i: leaf.reshape(len(leaf), -1) for i, leaf in enumerate(leaves(few)) if _is_whole(leaf)}
    if not whole:
        return []
    smallest: dict[tuple[int, int], tuple[int, str]] = {}  # leaf and column -> lines and name of their table
    for name, lines, given in _seen_by_tables(network, few):
        for i, leaf in whole.items():
            varied = (leaf != leaf[:1]).any(0)
            for column in (_among(leaf, given) & varied).nonzero()[:, 0].tolist():
                smallest[i, column] = min(smallest.get((i, column), (lines, name)), (lines, name))
    tables: dict[tuple[int, int, str], list[int]] = {}
    for (i, column), (lines, name) in smallest.items():
        tables.setdefault((i, lines, name), []).append(column)
    return [
        Lookup(i, torch.tensor(sorted(columns), device=whole[i].device), lines)
        for (i, lines, _), columns in tables.items()
    ]


def _among(leaf: Tensor, given: Tensor) -> Tensor:  # (n, p), (m, k) -> bool (p,)
    """Return which columns of a tensor are among those that a table is given."""
    if leaf.shape == given.shape:
        return (leaf == given).all(0)
    if len(leaf) != len(given) or leaf.numel() * given.shape[1] > _MOST_COMPARED:
        return leaf.new_zeros(leaf.shape[1], dtype=torch.bool)
    return (leaf[:, :, None] == given[:, None, :]).all(0).any(1)


def _is_whole(leaf: Tensor) -> bool:
    return leaf.ndim > 0 and not (leaf.is_floating_point() or leaf.is_complex())


def _seen_by_tables(network: Network, x: Any) -> Iterator[tuple[str, int, Tensor]]:  # (n, k) each
    """Iterate over what each table of the network is given for some inputs, with its name and its lines."""
    found: list[tuple[str, int, Tensor]] = []

    def watcher(name: str, lines: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if given is not None and given.ndim:
                found.append((name, lines, given.detach().reshape(len(given), -1).clone()))

        return keep

    with network.lock:
        tables = [(name, part) for name, part in network.module.named_modules() if isinstance(part, _TABLES)]
        handles = [
            part.register_forward_pre_hook(watcher(name, part.num_embeddings), with_kwargs=True)
            for name, part in tables
        ]
        try:
            if tables:
                network.outputs(x)
        finally:
            for handle in handles:
                handle.remove()
    return iter(found)
