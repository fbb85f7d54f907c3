"""Rows of which each process has a part: one matrix of several processes, divided by its rows or by its columns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from nullbayes.distributed import Group
from nullbayes.limits import RowCosts, Storage
from nullbayes.linalg.pieces import Factors
from nullbayes.linalg.rows import Block, Rows
from nullbayes.precision import full_precision


class SharedRows(Rows):
    """One matrix of several processes. Memory, storage and costs are those of the part that this process has.

    Every process must call the same methods in the same order, and all work with the same ``working_bytes``. A subclass
    says how the parts make up the matrix, and sets ``n_rows`` or what else is not that of the part.

    Parameters
    ----------
    own : Rows
        The part of this process.
    group : Group
        The processes.
    """

    def __init__(self, own: Rows, group: Group) -> None:
        self.own, self.group = own, group
        self.n_rows, self.n_columns = own.n_rows, own.n_columns
        self.dtype, self.device = own.dtype, own.device
        self.rows_per_example, self.block_rows = own.rows_per_example, own.block_rows
        self.spares_short_rows = own.spares_short_rows
        parts = group.gather((own.n_rows, own.n_columns, own.reference is own))
        self._part_shapes = [(n_rows, n_columns) for n_rows, n_columns, _ in parts]
        exact = all(is_exact for *_, is_exact in parts)  # in all processes: one without rows holds none of them in half
        self._reference: Rows = self if exact else type(self)(own.reference, group)

    def keep(self, *, half: bool = False, host: bool = False) -> Self:
        """Return the same rows, with the part of this process held in memory."""
        return type(self)(self.own.keep(half=half, host=host), self.group)

    def costs(self, storage: Storage = "device") -> RowCosts:
        """Return what the part of this process costs."""
        return self.own.costs(storage)

    @property
    def reference(self) -> Rows:
        """The rows that the final residual is measured on."""
        return self._reference

    @property
    def working_bytes(self) -> int:
        """Temporary bytes that the part of this process may use."""
        return self.own.working_bytes

    @working_bytes.setter
    def working_bytes(self, value: int) -> None:
        self.own.working_bytes = value

    @property
    def numbers_per_row(self) -> int:
        """Stored numbers per row, in the part of this process."""
        return self.own.numbers_per_row


class JointRows(SharedRows):
    """The rows of all processes, one below the other in order of rank.

    ``n_rows``, ``mv``, ``rmv``, ``norms``, ``lengths`` and ``gram`` are those of the whole matrix, in every process.
    ``cuts`` and ``blocks`` go through the rows of this process alone, with their numbers in the whole matrix, so that a
    sum over blocks is completed by ``total``.

    Parameters
    ----------
    own : Rows
        The rows of this process. There may be none of them.
    group : Group
        The processes.
    """

    def __init__(self, own: Rows, group: Group) -> None:
        super().__init__(own, group)
        self._sizes = [n_rows for n_rows, _ in self._part_shapes]
        self._offset, self.n_rows = sum(self._sizes[: group.rank]), sum(self._sizes)
        self.row_group = group

    def cuts(self, block_rows: int) -> tuple[tuple[int, int], ...]:
        """Cut the rows of this process into blocks; they are numbered as in the whole matrix."""
        own = self.own.cuts(block_rows) if self.own.n_rows else ()
        return tuple((self._offset + start, self._offset + stop) for start, stop in own)

    def block(self, start: int, stop: int) -> Block:
        """Return rows ``start`` to ``stop``, which must be rows of this process."""
        return self.own.block(start - self._offset, stop - self._offset)

    @full_precision()
    def mv(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, R)
        """Multiply with all rows."""
        own = self.own.mv(vectors) if self.own.n_rows else vectors.new_zeros(len(vectors), 0)
        return self.group.join(own, dim=1)

    def lengths(self) -> Tensor:  # (R,)
        """Return the length of each row, in float64."""
        none = torch.zeros(0, dtype=torch.float64, device=self.device)
        return self.group.join(self.own.lengths() if self.own.n_rows else none)

    @full_precision()
    def gram(self, dtype: torch.dtype) -> Tensor:  # (R, R)
        """Return the Gram matrix of all rows: each process multiplies its own with those of all, some at a time."""
        step, strips = max(1, self.working_bytes // (4 * dtype.itemsize * self.n_columns)), []
        each = self.rows_per_example
        for rank, size in enumerate(self._sizes):
            for start in range(0, size, max(1, step // each) * each):
                stop = min(size, start + max(1, step // each) * each)
                mine = rank == self.group.rank
                empty = torch.zeros(stop - start, self.n_columns, dtype=self.dtype, device=self.device)
                other = self.group.broadcast(self.own.block(start, stop).dense() if mine else empty, rank).to(dtype)
                blocks = self.blocks(max(each, min(step, self.rows_per_pass)))
                products = [block.dense().to(dtype) @ other.T for _, block in blocks]
                strips.append(torch.cat(products) if products else other.new_zeros(0, stop - start))
        return self.group.join(torch.cat(strips, dim=1))

    @full_precision()
    def dense(self) -> Tensor:  # (R, P)
        """Return all entries."""
        none = torch.zeros(0, self.n_columns, dtype=self.dtype, device=self.device)
        return self.group.join(self.own.dense() if self.own.n_rows else none)

    @property
    def rows_per_pass(self) -> int:
        """Rows to multiply at a time."""
        return self.own.rows_per_pass if self.own.n_rows else 1

    @property
    def rows_per_normal_pass(self) -> int:
        """Rows to read at a time while the normal matrix is summed."""
        return self.own.rows_per_normal_pass if self.own.n_rows else 1


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
        self.column_group = group

    @property
    def n_all_columns(self) -> int:
        """The number of columns of all processes."""
        return self._edges[-1]

    def own_columns(self, vectors: Tensor) -> Tensor:
        """Return the part of vectors that belongs to the columns of this process."""
        return vectors[:, self._edges[self.group.rank] : self._edges[self.group.rank + 1]]

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
