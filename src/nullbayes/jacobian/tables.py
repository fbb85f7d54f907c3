"""Which columns of the inputs are looked up in which table of embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.jacobian.batches import leaves, take_examples, to_device
from nullbayes.jacobian.network import Network, arguments

_FEW = 32  # examples: columns of different meaning are not equal in all of them by chance
_LEAST = 8  # examples for which a column that is cut out of a tensor is recognized
_MOST_COPIED = 10**9  # parameters of a network on a GPU that is copied to the host
_NO_WORDS = ("position_ids", "token_type_ids", "attention_mask")
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
    padding : int or None
        The line that stands for padding, if the table says so.
    """

    leaf: int
    columns: Tensor
    lines: int
    padding: int | None = None


def find_lookups(network: Network, x: Any) -> list[Lookup]:
    """Return the columns of whole numbers that go into tables of embeddings as they are.

    Columns that are the same for every example, such as a token that begins each sentence, are left out: they cannot be
    told from others that mean something else. So are masks, types of segments and numbers of positions. A column that
    goes into several tables counts for the smallest of them.

    Parameters
    ----------
    network : Network
        The trained network.
    x : Tensor, tuple or mapping of tensors
        Inputs, of which the first few are used.
    """
    few = take_examples(x, 0, _FEW)
    all_leaves, named = list(leaves(x)), [id(x[name]) for name in _NO_WORDS if isinstance(x, Mapping) and name in x]
    whole = {
        i: few_leaf.reshape(len(few_leaf), -1)
        for i, (leaf, few_leaf) in enumerate(zip(all_leaves, leaves(few), strict=True))
        if id(leaf) not in named and _may_be_words(leaf, several=len(all_leaves) > 1)
    }
    if not whole:
        return []
    smallest: dict[tuple[int, int], tuple[int, str]] = {}  # leaf and column -> lines and name of their table
    paddings: dict[str, int | None] = {}
    for name, table, given in _seen_by_tables(network, few):
        paddings[name], own = table.padding_idx, (table.num_embeddings, name)
        for i, leaf in whole.items():
            varied = (leaf != leaf[:1]).any(0)
            for column in (_among(leaf, given) & varied).nonzero()[:, 0].tolist():
                smallest[i, column] = min(smallest.get((i, column), own), own)
    tables: dict[tuple[int, int, str], list[int]] = {}
    for (i, column), (lines, name) in smallest.items():
        tables.setdefault((i, lines, name), []).append(column)
    return [
        Lookup(i, torch.tensor(sorted(columns), device=whole[i].device), lines, paddings[name])
        for (i, lines, name), columns in tables.items()
    ]


def takes(network: Network, x: Any) -> bool:
    """Whether the network can be run on some inputs.

    A number may be a line of a table and be refused all the same, such as where it is an index of something else, too.
    A GPU does not survive an index that is out of range, so that a copy of the network is tried on the host.

    Parameters
    ----------
    network : Network
        The trained network.
    x : Tensor, tuple or mapping of tensors
        A few inputs.
    """
    try:
        if network.device.type == "cpu":
            network.outputs(x)
            return True
        if sum(p.numel() for p in network.module.parameters()) > _MOST_COPIED:
            return False
        args, kwargs = arguments(to_device(x, torch.device("cpu")))
        with network.lock:
            module = copy.deepcopy(network.module).cpu()
        with torch.no_grad():
            module(*args, **kwargs)
    except Exception:  # whatever the network, its copy or an operation on the host makes of them
        return False
    return True


def _among(leaf: Tensor, given: Tensor) -> Tensor:  # (n, p), (m, k) -> bool (p,)
    """Return which columns of a tensor are among those that a table is given."""
    if leaf.shape == given.shape:
        return (leaf == given).all(0)
    if not _LEAST <= len(leaf) == len(given) or leaf.numel() * given.shape[1] > _MOST_COMPARED:
        return leaf.new_zeros(leaf.shape[1], dtype=torch.bool)
    return (leaf[:, :, None] == given[:, None, :]).all(0).any(1)


def _may_be_words(leaf: Tensor, *, several: bool) -> bool:
    """Whether a tensor may hold tokens or categories: whole numbers, but no mask and no numbers of positions."""
    if not leaf.ndim or leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool:
        return False
    if several and bool(((leaf == 0) | (leaf == 1)).all()):
        return False
    steps = leaf.reshape(len(leaf), -1).long().diff(dim=1)
    grid = bool(((steps == 0) | (steps == 1)).all()) and bool((steps == 1).any())
    return steps.shape[1] < 2 or not grid


def _seen_by_tables(network: Network, x: Any) -> Iterator[tuple[str, Any, Tensor]]:  # (n, k) each
    """Iterate over what each table of the network is given for some inputs, with its name."""
    found: list[tuple[str, Any, Tensor]] = []

    def watcher(name: str, table: nn.Module) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if given is not None and given.ndim and given.numel():
                found.append((name, table, given.detach().reshape(len(given), -1).clone()))

        return keep

    with network.lock, ExitStack() as hooks:
        tables = [(name, part) for name, part in network.module.named_modules() if isinstance(part, _TABLES)]
        for name, part in tables:
            hooks.enter_context(part.register_forward_pre_hook(watcher(name, part), with_kwargs=True))
        if tables:
            network.outputs(x)
    return iter(found)
