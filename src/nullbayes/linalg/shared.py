"""Rows of which each process has a part: what they ask of that part alone, however the matrix is divided."""

from __future__ import annotations

from typing import Self

from nullbayes.distributed import Group
from nullbayes.limits import RowCosts, Storage
from nullbayes.linalg.rows import Rows


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

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return self.group.size == 1
