"""Artificial strangers of networks with tables of embeddings: tokens and categories that are not among the data.

A line of a table that no training example looks up is as it was before training, and what the network makes of it is
chance. Inputs that are made of familiar tokens cannot show that, so these take other lines of the same table:

- *words*: every token is one that no familiar input has;
- *some_words*: a quarter of them are;
- *repeat*: one token of the example stands at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nullbayes.jacobian.batches import leaves, map_leaves
from nullbayes.jacobian.tables import Lookup

_SOME = 0.25  # of the tokens are replaced
_POSITIONS = 3  # of one table, from which on they are a sequence and not categories
# From tokens, which of them may change, and the lines of their table.
Change = Callable[[Tensor, Tensor, int, torch.Generator], Tensor]


def strange_words(x: Any, lookups: Sequence[Lookup], generator: torch.Generator) -> Iterator[tuple[str, Any]]:
    """Iterate over the kinds of strangers that can be made of some inputs with other tokens.

    Parameters
    ----------
    x : Tensor, tuple or mapping of tensors
        Familiar inputs.
    lookups : sequence of Lookup
        The columns that are looked up in tables.
    generator : torch.Generator
        On the CPU. The same seed gives the same strangers on every device.
    """
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    for name, change in _KINDS.items() if lookups else ():
        parts = list(leaves(x))
        for lookup in lookups:
            parts[lookup.leaf] = _changed(parts[lookup.leaf], lookup, mask, change, generator)
        following = iter(parts)
        yield name, map_leaves(lambda _leaf, following=following: next(following), x)


def _changed(leaf: Tensor, lookup: Lookup, mask: Any, change: Change, generator: torch.Generator) -> Tensor:
    """Return a tensor of the inputs with other entries in the columns that are looked up in a table."""
    result = leaf.reshape(len(leaf), -1).clone()
    tokens = result[:, lookup.columns]
    if int(tokens.min()) < 0 or int(tokens.max()) >= lookup.lines:  # equal to what the table was given by chance
        return leaf
    inner = torch.ones_like(result, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == leaf.shape:  # without the ends of a sentence, which often are marked
        counts = torch.nn.functional.pad(mask.bool(), (1, 1))
        inner = counts[:, 1:-1] & counts[:, 2:] & counts[:, :-2]
    result[:, lookup.columns] = change(tokens, inner[:, lookup.columns], lookup.lines, generator)
    return result.view_as(leaf)


def _words(tokens: Tensor, inner: Tensor, lines: int, generator: torch.Generator, share: float = 1.0) -> Tensor:
    known = torch.zeros(lines, dtype=torch.bool, device=tokens.device)
    known[tokens.long().flatten()] = True
    other = (~known).nonzero()[:, 0]
    if not len(other):
        return tokens
    drawn = torch.rand((2, *tokens.shape), generator=generator, device="cpu").to(tokens.device)
    new = other[(drawn[0] * len(other)).long().clamp_max(len(other) - 1)]
    return torch.where(inner & (drawn[1] < share), new.to(tokens.dtype), tokens)


def _repeat(tokens: Tensor, inner: Tensor, lines: int, generator: torch.Generator) -> Tensor:
    if tokens.shape[1] < _POSITIONS:
        return tokens
    drawn = torch.rand(tokens.shape, generator=generator, device="cpu").to(tokens.device)
    chosen = tokens.gather(1, (drawn * inner).argmax(1, keepdim=True))
    return torch.where(inner, chosen, tokens)


_KINDS: dict[str, Change] = {"words": _words, "some_words": partial(_words, share=_SOME), "repeat": _repeat}
