"""How processes divide the parameters of a network among them: whole tensors, in order, about as many numbers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from nullbayes.distributed import ALONE, Group
from nullbayes.errors import SettingsError
from nullbayes.limits import RowCosts
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.shared import DividedRows


@dataclass(frozen=True)
class Division:
    """A division of parameters, and the part of one process.

    Attributes
    ----------
    edges : tuple of (int, int)
        Where the parts begin and end: numbers of tensors, and of columns.
    rank : int
        The process whose part it is.
    group : Group
        The processes; this one alone in a plan for others.
    """

    edges: tuple[tuple[int, int], ...]
    rank: int
    group: Group = ALONE

    @property
    def tensors(self) -> tuple[int, int]:
        """The first tensor of the part, and the one after its last."""
        return self.edges[self.rank][0], self.edges[self.rank + 1][0]

    @property
    def columns(self) -> slice:
        """Where the part lies in a flat vector of all parameters."""
        return slice(self.edges[self.rank][1], self.edges[self.rank + 1][1])

    @property
    def sizes(self) -> list[int]:
        """The number of columns of each part."""
        return [b - a for (_, a), (_, b) in pairwise(self.edges)]

    def joined(self, rows: Rows) -> Rows:
        """Return the rows of all parameters, given those of this process."""
        return DividedRows(rows, self.group)

    def heaviest(self, own: RowCosts) -> RowCosts:
        """Return what rows cost in the process that has most of them, given what they cost here."""
        every = self.group.gather(own)
        most = max(every, key=lambda costs: costs.n_columns)
        names = ("numbers_per_row", "full_bytes", "held_bytes", "example_bytes")
        largest = {name: max(getattr(costs, name) for costs in every) for name in names}
        parts, total = len(self.sizes), self.edges[-1][1]
        return replace(most, **largest, device=own.device, column_parts=parts, all_columns=total)

    def collected(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, all P)
        """Return the vectors of all processes to the first, in host memory, one by one; to the others, none."""
        first = self.group.rank == 0
        whole = torch.empty(len(vectors) if first else 0, self.edges[-1][1], dtype=vectors.dtype, device="cpu")
        for i, vector in enumerate(vectors):
            for rank, size in enumerate(self.sizes):
                sent = self.group.broadcast(vector if rank == self.rank else vector.new_empty(size), rank)
                if first:
                    whole[i, self.edges[rank][1] : self.edges[rank + 1][1]] = sent
        return whole


def divide(sizes: Sequence[int], group: Group) -> Division:
    """Divide tensors of these sizes among processes."""
    return Division(_edges(sizes, group.size), group.rank, group)


def expected(sizes: Sequence[int], n: int) -> Division:
    """Return a division among ``n`` processes that are not there, with the part of the one that has most."""
    found = Division(_edges(sizes, n), 0)
    return replace(found, rank=found.sizes.index(max(found.sizes)))


def _edges(sizes: Sequence[int], n: int) -> tuple[tuple[int, int], ...]:
    """Cut consecutive tensors into ``n`` parts, of which the largest is as small as can be."""
    if len(sizes) < n:
        msg = (
            f"The parameters that vary are {len(sizes)} tensors, which {n} processes cannot divide among them: start "
            f'at most {len(sizes)} processes, or use parallel="data".'
        )
        raise SettingsError(msg)
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, middle, 1)) <= n else (middle + 1, high)
    starts = _filled(sizes, low, n)
    columns = [0, *accumulate(sizes)]
    return tuple((i, columns[i]) for i in (*starts, len(sizes)))


def _filled(sizes: Sequence[int], most: int, n: int) -> list[int]:
    """Return where parts begin if each takes tensors up to ``most`` numbers; there are at least ``n`` of them."""
    starts, room = [0], most - sizes[0]
    for i, size in enumerate(sizes[1:], 1):
        if size > room or len(sizes) - i == n - len(starts):
            starts.append(i)
            room = most
        room -= size
    return starts
