"""The rows of several processes as one matrix, of which each process holds and reads only its own blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.distributed import Group
from nullbayes.linalg.rows import Block, Rows
from nullbayes.linalg.shared import SharedRows
from nullbayes.precision import full_precision


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

    def total(self, part: Tensor) -> Tensor:
        """Add up the parts of all processes."""
        return self.group.sum(part)

    @property
    def n_parts(self) -> int:
        """The number of processes."""
        return self.group.size

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
