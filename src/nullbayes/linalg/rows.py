r"""Rows: a matrix :math:`A` of shape (n_rows, n_columns), read block by block.

Everything the projectors know of a network is here: a :class:`Block` of consecutive rows multiplies vectors,
multiplies with its transpose, gives its Gram matrix, or its entries. Vectors come in batches and lie in rows:
``V`` is (S, n_columns), ``U`` is (S, m), so :math:`A V^\top` is returned as ``V @ A.T`` of shape (S, m).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from nullbayes.errors import NullBayesError, SettingsError
from nullbayes.linalg.pieces import Factors, tile_rows
from nullbayes.precision import full_precision
from nullbayes.types import Storage

_WALK_ROWS = {"cpu": 4096, "cuda": 65536}  # taken at a time: enough for full speed, few beside what is held
_WORKING_BYTES = {"cpu": 2**28, "cuda": 2**32}  # where nobody says how much there is


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


class Rows(ABC):
    """A matrix that is read in blocks of consecutive rows, in any order, as often as one likes.

    Attributes
    ----------
    n_rows, n_columns : int
        The shape of the matrix.
    dtype, device
        Of the vectors that it multiplies.
    granule : int
        Rows that belong together (the outputs of one example): blocks are cut at multiples of it.
    block_rows : int or None
        The block size that a projector takes when it is not told another; None lets it choose.
    spares_short_rows : bool
        Whether rows that are short beside the others need not be held as closely as they are. Projectors then scale
        rows to unit length only if they are longer than a tenth of the tolerance times the root mean square length:
        all shorter ones together change by no more than a tenth of what the tolerance allows.
    working_bytes : int
        How much may be in memory for a moment while rows are formed or multiplied, beside rows that are held, vectors
        and results. What goes part by part takes its parts by it. Settable.
    """

    n_rows: int
    n_columns: int
    dtype: torch.dtype
    device: torch.device
    granule: int = 1
    block_rows: int | None = None
    spares_short_rows: bool = False
    _working_bytes: int | None = None
    _frobenius: float | None = None

    @abstractmethod
    def block(self, start: int, stop: int) -> Block:
        """Return rows ``start`` to ``stop`` (exclusive)."""

    def gram_cost(self) -> float:
        """Return the floating-point operations behind one entry of a Gram matrix."""
        return 2.0 * self.n_columns

    def product_cost(self) -> float:
        """Return the floating-point operations of one row times one vector."""
        return 2.0 * self.n_columns

    def normal_cost(self) -> float:
        """Return the floating-point operations of the normal matrix, summed over all rows."""
        return float(self.n_rows) * self.n_columns**2

    def kept_bytes(self, *, half: bool = False) -> int:
        """Return the bytes that :meth:`keep` takes beyond what is already held."""
        return self.n_rows * self.n_columns * self.dtype.itemsize // (2 if half else 1)

    @abstractmethod
    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return the same rows, held in memory: of the device or of the host, whole or in half the bytes."""

    def cuts(self, block_rows: int) -> tuple[tuple[int, int], ...]:
        """Cut the rows into blocks of about ``block_rows``, even in size, none of them dropped."""
        if block_rows < 1:
            msg = f"block_rows must be at least 1, not {block_rows}."
            raise SettingsError(msg)
        granules = -(-self.n_rows // self.granule)
        n_blocks = max(1, -(-granules // max(1, block_rows // self.granule)))
        edges = [min(self.n_rows, granules * i // n_blocks * self.granule) for i in range(n_blocks + 1)]
        return tuple((a, b) for a, b in pairwise(edges) if b > a)

    def blocks(self, block_rows: int) -> Iterator[tuple[slice, Block]]:
        """Iterate over the blocks of :meth:`cuts`, in order."""
        for start, stop in self.cuts(block_rows):
            yield slice(start, stop), self.block(start, stop)

    @property
    def working_bytes(self) -> int:
        """Bytes that may be in memory for a moment; see the class."""
        return self._working_bytes or _WORKING_BYTES.get(self.device.type, 2**28)

    @working_bytes.setter
    def working_bytes(self, value: int) -> None:
        self._working_bytes = value

    @property
    def walk_rows(self) -> int:
        """Rows to hold at a time when they are only passed through."""
        wide = 16 * max(1, self.held_numbers)  # in float64, and squared
        return self._whole(min(_WALK_ROWS.get(self.device.type, 4096), self.working_bytes // wide))

    @property
    def held_numbers(self) -> int:
        """How many numbers stand for a row where it is held."""
        return self.n_columns

    def _whole(self, n_rows: int) -> int:
        """Return about as many rows, of whole examples: at least one, and no more than there are."""
        return min(self.n_rows, max(1, n_rows // self.granule) * self.granule)

    @property
    def normal_rows(self) -> int:
        """Rows to hold at a time while the normal matrix is summed."""
        return self.walk_rows

    def least_working_bytes(self, storage: Storage, n_vectors: int) -> int:
        """Return the least :attr:`working_bytes` that rows stored that way can work with."""
        return 2**16

    def forming_bytes(self, storage: Storage, working_bytes: int) -> int:
        """Return how much of the working bytes is needed to form rows that are then held."""
        return 0

    def forming_chunks(self, storage: Storage, working_bytes: int) -> int:
        """Return in how many chunks the rows are formed, once; few bytes make many, and each takes its time."""
        return 0

    def passing_bytes(self, storage: Storage, working_bytes: int, block_rows: int, n_vectors: int) -> tuple[int, int]:
        """Return how much of the working bytes the Gram matrix of a block takes, and products with it."""
        tile = min(block_rows, tile_rows(self.device, working_bytes))
        gram = 16 * tile**2 + min(working_bytes // 2, 16 * tile * self.held_numbers)
        products = int(block_rows * self.product_bytes(storage, n_vectors))
        return min(working_bytes, gram), min(working_bytes, products)

    def product_bytes(self, storage: Storage, n_vectors: int) -> float:
        """Return the bytes a row that products with so many vectors take for a moment."""
        return 0.0

    @property
    def reference(self) -> Rows:
        """The rows that the final residual is measured on: these, unless they are an approximation of others."""
        return self

    @full_precision()
    def mv(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, R)
        """Multiply: ``vectors @ A.T``."""
        return torch.cat([block.mv(vectors) for _, block in self.blocks(self.walk_rows)], dim=1)

    @full_precision()
    def rmv(self, vectors: Tensor) -> Tensor:  # (S, R) -> (S, P)
        """Multiply with the transpose: ``vectors @ A``."""
        result = vectors.new_zeros(len(vectors), self.n_columns)
        for where, block in self.blocks(self.walk_rows):
            result += block.rmv(vectors[:, where])
        return result

    @full_precision()
    def norms(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S,)
        r"""Return :math:`\|A v\|` for each vector, summed in float64."""
        total = torch.zeros(len(vectors), dtype=torch.float64, device=vectors.device)
        for _, block in self.blocks(self.walk_rows):
            total += block.mv(vectors).double().square().sum(1)
        return total.sqrt()

    def lengths(self) -> Tensor:  # (R,)
        """Return the length of each row, in float64."""
        parts = []
        for _, block in self.blocks(self.walk_rows):
            squares = torch.zeros(block.n_rows, dtype=torch.float64, device=self.device)
            for gradients, activations, _ in block.factors():
                share = gradients.double().square().sum(2)
                if activations is not None:
                    share *= activations.double().square().sum(1, keepdim=True)
                squares += share.flatten()
            parts.append(squares.sqrt())
        lengths = torch.cat(parts)
        if not torch.isfinite(lengths).all():
            msg = "Rows hold NaN or Inf, or entries whose squares overflow: look for extreme values in them."
            raise NullBayesError(msg)
        return lengths

    def unit_scale(self, rtol: float = 0.0) -> Tensor:  # (R,)
        """Return what scales each row to unit length, in float64; 0 for rows that are zero in their own precision.

        Rows that are spared at a tolerance are scaled as the longest of them would be.
        """
        lengths, tiny = self.lengths(), torch.finfo(self.dtype).tiny
        least = max(tiny, self.spared(rtol))
        return torch.where(lengths > tiny, 1.0 / lengths.clamp_min(least), 0.0)

    def spared(self, rtol: float) -> float:
        """Return the length up to which rows are spared at a tolerance."""
        return rtol / 10.0 * self.frobenius() / self.n_rows**0.5 if self.spares_short_rows and rtol else 0.0

    def frobenius(self) -> float:
        """Return the Frobenius norm of the matrix, estimated once from a few Gaussian vectors."""
        if self._frobenius is None:
            generator = torch.Generator().manual_seed(0x6E756C6C)  # no seed that a user's noise is likely to have
            probes = torch.randn(4, self.n_columns, generator=generator, dtype=torch.float64, device="cpu")
            self._frobenius = float(self.norms(probes.to(self.device, self.dtype)).square().mean().sqrt())
        return self._frobenius

    @full_precision()
    def dense(self) -> Tensor:  # (R, P)
        """Return all entries."""
        return torch.cat([block.dense() for _, block in self.blocks(self.walk_rows)])
