"""Artificial strangers of networks with tables of embeddings: tokens and categories that are not among the data.

A line of a table that no training example looks up is as it was before training, and what the network makes of it is
chance. Inputs that are made of familiar tokens cannot show that, so these take other lines of the same table:

- *words*: every token is one that none of the familiar inputs has;
- *some_words*: a quarter of them are;
- *repeat*: one token of the example stands at every position.

Padding stays as it is: positions that a mask leaves out, the line that a table has for padding, or else a token that,
once it occurs, fills the rest of every example.
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
# From tokens, which of them may change, and the lines of their table that no familiar input has.
Change = Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor]


def strange_words(
    x: Any, lookups: Sequence[Lookup], generator: torch.Generator, others: Sequence[Any] = ()
) -> Iterator[tuple[str, Any]]:
    """Iterate over the kinds of strangers that can be made of some inputs with other tokens.

    Parameters
    ----------
    x : Tensor, tuple or mapping of tensors
        Familiar inputs.
    lookups : sequence of Lookup
        The columns that are looked up in tables.
    generator : torch.Generator
        On the CPU. The same seed gives the same strangers on every device.
    others : sequence of inputs
        Further familiar inputs, such as those of other lengths: their tokens are familiar, too.
    """
    for name, change in _KINDS.items() if lookups else ():
        yield name, _replaced(x, lookups, others, lambda *given, change=change: change(*given, generator))


def extreme_words(x: Any, lookups: Sequence[Lookup], others: Sequence[Any] = ()) -> Iterator[Any]:
    """Iterate over inputs with the first and with the last of the new tokens everywhere, to try a network with."""
    for which in (0, -1):
        yield _replaced(x, lookups, others, lambda tokens, inner, new, which=which: _only(tokens, inner, new, which))


def _only(tokens: Tensor, inner: Tensor, new: Tensor, which: int) -> Tensor:
    return torch.where(inner, new[which].to(tokens.dtype), tokens) if len(new) else tokens


def _replaced(x: Any, lookups: Sequence[Lookup], others: Sequence[Any], change: Callable[..., Tensor]) -> Any:
    """Return inputs with what ``change(tokens, which may change, new lines)`` returns in columns of tables."""
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    parts = list(leaves(x))
    for lookup in lookups:
        leaf = parts[lookup.leaf]
        same = [part for other in others for part in list(leaves(other))[lookup.leaf : lookup.leaf + 1]]
        new = _new_lines([leaf, *same], lookup)
        result = leaf.reshape(len(leaf), -1).clone()
        tokens = result[:, lookup.columns]
        if int(tokens.min()) < 0 or int(tokens.max()) >= lookup.lines:  # equal to what the table was given by chance
            continue
        inner = ~_padding(tokens, lookup.padding)
        if isinstance(mask, Tensor) and mask.shape == leaf.shape:  # without the ends of a sentence, often marked
            counts = torch.nn.functional.pad(mask.bool(), (1, 1))
            inner &= (counts[:, 1:-1] & counts[:, 2:] & counts[:, :-2])[:, lookup.columns]
        result[:, lookup.columns] = change(tokens, inner, new)
        parts[lookup.leaf] = result.view_as(leaf)
    following = iter(parts)
    return map_leaves(lambda _leaf: next(following), x)


def _new_lines(familiar: Sequence[Tensor], lookup: Lookup) -> Tensor:
    """Return the lines that the type of the tokens can number and that no familiar input has, in any column."""
    lines = min(lookup.lines, torch.iinfo(familiar[0].dtype).max + 1)
    new = torch.ones(lines, dtype=torch.bool, device=familiar[0].device)
    for leaf in familiar:
        known = leaf.long().flatten()
        new[known[(known >= 0) & (known < lines)]] = False
    if lookup.padding is not None and 0 <= lookup.padding < lines:
        new[lookup.padding] = False
    return new.nonzero()[:, 0]


def _padding(tokens: Tensor, line: int | None) -> Tensor:  # (n, k) -> bool (n, k)
    """Return which tokens are padding; where the table does not say, a token that fills the rest of every example."""
    if line is not None or tokens.shape[1] < _POSITIONS:
        return tokens == line if line is not None else torch.zeros_like(tokens, dtype=torch.bool)
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for end, order in ((-1, 1), (0, -1)):
        same = tokens == tokens[:, end].mode().values
        steps = same.to(torch.int8).diff(dim=1) * order
        if bool((steps >= 0).all()) and bool((same.sum(1) > 1).any()):
            found |= same
    return found


def _words(tokens: Tensor, inner: Tensor, new: Tensor, generator: torch.Generator, share: float = 1.0) -> Tensor:
    if not len(new):
        return tokens
    drawn = torch.rand((2, *tokens.shape), generator=generator, device="cpu").to(tokens.device)
    chosen = new[(drawn[0] * len(new)).long().clamp_max(len(new) - 1)]
    return torch.where(inner & (drawn[1] < share), chosen.to(tokens.dtype), tokens)


def _repeat(tokens: Tensor, inner: Tensor, new: Tensor, generator: torch.Generator) -> Tensor:
    if tokens.shape[1] < _POSITIONS:
        return tokens
    drawn = torch.rand(tokens.shape, generator=generator, device="cpu").to(tokens.device)
    chosen = tokens.gather(1, (drawn * inner).argmax(1, keepdim=True))
    return torch.where(inner, chosen, tokens)


_KINDS: dict[str, Change] = {"words": _words, "some_words": partial(_words, share=_SOME), "repeat": _repeat}
