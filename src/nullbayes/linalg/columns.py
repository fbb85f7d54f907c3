"""The columns of several processes as one matrix, of which each process holds and multiplies only its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nullbayes.distributed import Group
from nullbayes.errors import SettingsError
from nullbayes.linalg.pieces import Factors
from nullbayes.linalg.rows import Block, Rows
from nullbayes.linalg.shared import SharedRows


@dataclass(frozen=True)
class DividedBlock(Block):
    """Some rows of all columns, of which this process has a part."""

    own: Block
    group: Group
    n_rows: int

    def mv(self, vectors: Tensor) -> Tensor:
        """Multiply the columns of each process with its part of the vectors, and add up the processes."""
        return self.group.sum(self.own.mv(vectors))

    def rmv(self, vectors: Tensor) -> Tensor:
        """Multiply with the transpose: the result belongs to the columns of this process."""
        return self.own.rmv(vectors)

    def dense(self) -> Tensor:
        """Return the entries in the columns of this process."""
        return self.own.dense()

    def gram(self, dtype: torch.dtype) -> Tensor:
        """Return ``B @ B.T``, a sum over columns."""
        return self.group.sum(self.own.gram(dtype))

    def factors(self) -> list[Factors]:
        """Return the columns of this process as products."""
        return self.own.factors()


class DividedRows(SharedRows):
    """The columns of all processes, side by side in order of rank.

    Vectors lie in the processes as the columns do: each has the part that belongs to its columns. ``mv``, ``norms``,
    ``lengths`` and ``gram`` are those of the whole matrix, in every process; ``rmv`` and ``dense`` return the part of
    this process.

    Parameters
    ----------
    own : Rows
        All rows, with the columns of this process.
    group : Group
        The processes.
    """

    def __init__(self, own: Rows, group: Group) -> None:
        super().__init__(own, group)
        self._edges = [0, *accumulate(n_columns for _, n_columns in self._part_shapes)]
        self._agreed: tuple[int, int] | None = None  # working_bytes, and the rows per pass that the processes agreed on

    def total_columns(self, part: Tensor) -> Tensor:
        """Add up the parts of all processes."""
        return self.group.sum(part)

    @property
    def n_all_columns(self) -> int:
        """The number of columns of all processes."""
        return self._edges[-1]

    def own_columns(self, vectors: Tensor) -> Tensor:
        """Return the part of vectors that belongs to the columns of this process."""
        return vectors[:, self._edges[self.group.rank] : self._edges[self.group.rank + 1]]

    def check_whole(self, what: str) -> None:
        """Refuse a method that needs all columns in one process."""
        msg = (
            f'{what} needs all columns in one process, and parallel="parameters" divides them: use projector="auto", '
            "nb.projectors.ExactDual(), or nb.projectors.Krylov(nb.projectors.Alternating(block_rows=...))."
        )
        raise SettingsError(msg)

    def block(self, start: int, stop: int) -> DividedBlock:
        """Return rows ``start`` to ``stop``."""
        return DividedBlock(self.own.block(start, stop), self.group, stop - start)

    def lengths(self) -> Tensor:  # (R,)
        """Return the length of each row, in float64."""
        return self.group.sum(self.own.lengths().square()).sqrt()

    @property
    def rows_per_pass(self) -> int:
        """Rows to multiply at a time: as many as all processes can, because they go through the same blocks."""
        if self._agreed is None or self._agreed[0] != self.working_bytes:
            self._agreed = self.working_bytes, min(self.group.gather(self.own.rows_per_pass))
        return self._agreed[1]
