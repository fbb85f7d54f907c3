r"""Rows: a matrix :math:`A` of shape (n_rows, n_columns) that is read block by block.

Rows are all that the projectors know of a network. A :class:`Block` of consecutive rows multiplies vectors, multiplies
with its transpose, and returns its Gram matrix or its entries. Vectors come in batches and lie in rows: ``V`` is
(S, n_columns), ``U`` is (S, m), so :math:`A V^\top` is returned as ``V @ A.T`` of shape (S, m).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from nullbayes.distributed import ALONE, Group
from nullbayes.errors import NullBayesError, SettingsError
from nullbayes.limits import PieceCosts, RowCosts, Storage, limits
from nullbayes.linalg.pieces import Factors, add_squares
from nullbayes.precision import full_precision


class Block(ABC):
    """Consecutive rows :math:`B` of a matrix, m of them."""

    n_rows: int

    @abstractmethod
    def mv(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, m)
        """Multiply: ``vectors @ B.T``."""

    @abstractmethod
    def rmv(self, vectors: Tensor) -> Tensor:  # (S, m) -> (S, P)
        """Multiply with the transpose: ``vectors @ B``."""

    @abstractmethod
    def dense(self) -> Tensor:  # (m, P)
        """Return the entries."""

    @abstractmethod
    def gram(self, dtype: torch.dtype) -> Tensor:  # (m, m)
        """Return ``B @ B.T``, accumulated in ``dtype``."""

    def factors(self) -> list[Factors]:
        """Return the rows as products of gradients and activations; entries are a special case."""
        return [Factors(self.dense()[:, None, :], None, 0)]

    def add_squares(self, result: Tensor) -> None:  # (m,)
        """Add the squares of the entries of each row to ``result``, in float64."""
        add_squares(self.factors(), result)


class Rows(ABC):
    """A matrix that is read in blocks of consecutive rows, in any order and any number of times.

    Attributes
    ----------
    n_rows, n_columns : int
        The shape of the matrix.
    dtype, device
        Of the vectors that it multiplies.
    rows_per_example : int
        Rows per example (its outputs): blocks are cut at multiples of it.
    block_rows : int or None
        The block size that a projector takes unless its settings name another; None lets it choose.
    spares_short_rows : bool
        Whether rows that are much shorter than the others need not be projected as precisely. Projectors then scale
        rows to unit length only if they are longer than a tenth of the tolerance times the root mean square length:
        all shorter ones together change by no more than a tenth of what the tolerance allows.
    working_bytes : int
        Temporary memory while rows are formed or multiplied, not counting stored rows, vectors and results. It sets how
        many rows are formed or multiplied at a time. Settable.
    row_group, column_group : Group
        The processes that have the rows, or the columns, of one matrix among them: this one alone, except for
        :class:`JointRows <nullbayes.linalg.shared.JointRows>` and ``DividedRows``.

    Examples
    --------
    All rows multiply vectors, and their transpose does; vectors lie in rows:

    >>> import nullbayes as nb
    >>> rows: Rows = nb.DenseRows(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]))
    >>> rows.mv(torch.ones(1, 3)), rows.rmv(torch.ones(1, 2))
    (tensor([[6., 1.]]), tensor([[1., 2., 4.]]))
    >>> [block.gram(torch.float64).shape for where, block in rows.blocks(block_rows=1)]
    [torch.Size([1, 1]), torch.Size([1, 1])]
    """

    n_rows: int
    n_columns: int
    dtype: torch.dtype
    device: torch.device
    rows_per_example: int = 1
    block_rows: int | None = None
    spares_short_rows: bool = False
    row_group: Group = ALONE
    column_group: Group = ALONE
    _working_bytes: int | None = None
    _frobenius: float | None = None

    @abstractmethod
    def block(self, start: int, stop: int) -> Block:
        """Return rows ``start`` to ``stop`` (exclusive)."""

    def costs(self, storage: Storage = "device") -> RowCosts:
        """Return what the rows cost where they are stored that way: by default, what entries cost."""
        p, n_bytes = self.n_columns, self.n_rows * self.n_columns * self.dtype.itemsize
        return RowCosts(
            *self._shape,
            storage=storage,
            pieces=(PieceCosts(n_bytes, gram_flops=2.0 * p, product_flops=2.0 * p),),
            full_bytes=n_bytes,
            held_bytes={"device": n_bytes, "host": n_bytes, "half": n_bytes // 2}.get(storage, 0),
            normal_flops=float(self.n_rows) * p**2,
        )

    @property
    def _shape(self) -> tuple[int, int, int, int, torch.dtype, torch.device, int]:
        """The first fields of :class:`RowCosts`."""
        shape = self.n_rows, self.n_columns, self.rows_per_example, self.numbers_per_row
        return *shape, self.dtype, self.device, self.working_bytes

    @abstractmethod
    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return the same rows held in memory: on the device or the host, in full or in half precision."""

    def cuts(self, block_rows: int) -> tuple[tuple[int, int], ...]:
        """Cut all rows into blocks of about ``block_rows`` rows and about equal size."""
        if block_rows < 1:
            msg = f"block_rows must be at least 1, not {block_rows}."
            raise SettingsError(msg)
        examples = -(-self.n_rows // self.rows_per_example)
        n_blocks = max(1, -(-examples // max(1, block_rows // self.rows_per_example)))
        edges = [min(self.n_rows, examples * i // n_blocks * self.rows_per_example) for i in range(n_blocks + 1)]
        return tuple((a, b) for a, b in pairwise(edges) if b > a)

    def blocks(self, block_rows: int) -> Iterator[tuple[slice, Block]]:
        """Iterate over the blocks of :meth:`cuts`, in order."""
        for start, stop in self.cuts(block_rows):
            yield slice(start, stop), self.block(start, stop)

    @property
    def working_bytes(self) -> int:
        """Temporary bytes that the rows may use; see the class."""
        return self._working_bytes or limits(self.device).working_bytes

    @working_bytes.setter
    def working_bytes(self, value: int) -> None:
        self._working_bytes = value

    @property
    def rows_per_pass(self) -> int:
        """Rows to multiply at a time in a pass over all of them."""
        wide = 16 * max(1, self.numbers_per_row)  # in float64, and squared
        return self._round_to_examples(min(limits(self.device).rows_per_pass, self.working_bytes // wide))

    @property
    def numbers_per_row(self) -> int:
        """Stored numbers per row."""
        return self.n_columns

    def _round_to_examples(self, n_rows: int) -> int:
        """Round a number of rows down to whole examples: at least one, and no more than there are."""
        return min(self.n_rows, max(1, n_rows // self.rows_per_example) * self.rows_per_example)

    @property
    def rows_per_normal_pass(self) -> int:
        """Rows to read at a time while the normal matrix is summed."""
        return self.rows_per_pass

    @property
    def reference(self) -> Rows:
        """The rows that the final residual is measured on: these, unless they approximate others."""
        return self

    def total(self, part: Tensor) -> Tensor:
        """Return a sum over all rows, of which ``part`` is the sum over :meth:`blocks`: the same, where these are all.

        Rows that are spread over processes have other blocks in other processes. Whatever is summed over blocks goes
        through here, and that is all that a projector does for them.
        """
        return self.row_group.sum(part)

    def total_columns(self, part: Tensor) -> Tensor:
        """Return a sum over all columns, of which ``part`` is the sum over those that this process has.

        Processes may divide the columns. Vectors are then as long as the columns of this process, and their products,
        lengths and inner products are sums that go through here.
        """
        return self.column_group.sum(part)

    def vector_lengths(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S,)
        """Return the length of each vector, in float64."""
        squares = torch.stack([vector.double().square().sum() for vector in vectors])  # one at a time is widened
        return self.total_columns(squares).sqrt()

    @property
    def n_all_columns(self) -> int:
        """The number of columns of all processes."""
        return self.n_columns

    def own_columns(self, vectors: Tensor) -> Tensor:  # (S, all columns) -> (S, P)
        """Return the part of vectors that belongs to the columns of this process."""
        return vectors

    @property
    def is_alone(self) -> bool:
        """Whether this process has all rows and all columns."""
        return self.row_group.size == self.column_group.size == 1

    def check_whole(self, what: str) -> None:
        """Refuse a method that needs all columns in one process, if several divide them."""
        if self.column_group.size > 1:
            msg = (
                f'{what} needs all columns in one process, and parallel="parameters" divides them: use '
                'projector="auto", nb.projectors.ExactDual(), or '
                "nb.projectors.Krylov(nb.projectors.Alternating(block_rows=...))."
            )
            raise SettingsError(msg)

    def gram(self, dtype: torch.dtype) -> Tensor:  # (R, R)
        """Return the Gram matrix of all rows, accumulated in ``dtype``."""
        return self.block(0, self.n_rows).gram(dtype)

    @full_precision()
    def mv(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, R)
        """Multiply: ``vectors @ A.T``."""
        return torch.cat([block.mv(vectors) for _, block in self.blocks(self.rows_per_pass)], dim=1)

    @full_precision()
    def rmv(self, vectors: Tensor) -> Tensor:  # (S, R) -> (S, P)
        """Multiply with the transpose: ``vectors @ A``."""
        result = vectors.new_zeros(len(vectors), self.n_columns)
        for where, block in self.blocks(self.rows_per_pass):
            result += block.rmv(vectors[:, where])
        return self.total(result)

    @full_precision()
    def norms(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S,)
        r"""Return :math:`\|A v\|` for each vector, summed in float64."""
        total = torch.zeros(len(vectors), dtype=torch.float64, device=vectors.device)
        for _, block in self.blocks(self.rows_per_pass):
            total += block.mv(vectors).double().square().sum(1)
        return self.total(total).sqrt()

    def lengths(self) -> Tensor:  # (R,)
        """Return the length of each row, in float64."""
        parts = []
        for _, block in self.blocks(self.rows_per_pass):
            squares = torch.zeros(block.n_rows, dtype=torch.float64, device=self.device)
            block.add_squares(squares)
            parts.append(squares.sqrt())
        lengths = torch.cat(parts)
        if not torch.isfinite(lengths).all():
            msg = "Rows hold NaN or Inf, or entries whose squares overflow: look for extreme values in them."
            raise NullBayesError(msg)
        return lengths

    def unit_scale(self, rtol: float = 0.0) -> Tensor:  # (R,)
        """Return the factor that scales each row to unit length, in float64; 0 for rows that are zero.

        Rows that are spared at a tolerance are scaled as the longest of them would be.
        """
        lengths, tiny = self.lengths(), torch.finfo(self.dtype).tiny
        least = max(tiny, self.spared(rtol))
        return torch.where(lengths > tiny, 1.0 / lengths.clamp_min(least), 0.0)

    def spared(self, rtol: float) -> float:
        """Return the length up to which rows are spared at a tolerance; see ``spares_short_rows``."""
        return rtol / 10.0 * self.frobenius() / self.n_rows**0.5 if self.spares_short_rows and rtol else 0.0

    def frobenius(self) -> float:
        """Return the Frobenius norm of the matrix, estimated once from four Gaussian vectors; copies share it."""
        if self._frobenius is None:
            generator = torch.Generator().manual_seed(0x6E756C6C)  # a seed that no user is likely to choose
            probes = torch.randn(4, self.n_all_columns, generator=generator, dtype=torch.float64, device="cpu")
            own = self.own_columns(probes).to(self.device, self.dtype)
            self._frobenius = float(self.norms(own).square().mean().sqrt())
        return self._frobenius

    @full_precision()
    def dense(self) -> Tensor:  # (R, P)
        """Return all entries."""
        return torch.cat([block.dense() for _, block in self.blocks(self.rows_per_pass)])
