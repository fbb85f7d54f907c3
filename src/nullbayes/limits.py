"""How much is computed at a time, in one table per kind of device; what rows need; and how much memory is free.

In the table, a larger number needs more temporary memory; a smaller one leaves the device idle between calls. None of
them changes a result beyond rounding. Code reads it through :func:`limits`; a test may replace an entry of ``LIMITS``.

:class:`RowCosts` is all that a plan is made from: rows compute products, and it says what they cost.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_SENTENCES = (  # of errors that torch raises as a plain RuntimeError
    "can't allocate memory",  # the allocator for CPUs
    "not enough memory",  # the same, on Windows
    "out of memory",
    "std::bad_alloc",
    "STATUS_ALLOC_FAILED",  # cuBLAS, cuSOLVER
)

Storage = Literal["device", "half", "factors", "host", "recompute", "matrix_free"]
"""Where rows are: held on the device, there in half precision or as factors; on the host; formed again; matrix-free."""

VECTORS_PER_SAMPLE = 10  # vectors in memory per sample: its noise, its direction, and one step of conjugate gradients
PRODUCT_COPIES = 6  # copies of a vector that exist while its matrix-free products are computed
_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # CUDA capabilities with float64 at full speed
_LEAST_WORKING_BYTES = 2**16
_PUSHED_VECTORS = 256  # vectors that matrix-free products take at a time, at most


@dataclass(frozen=True)
class Limits:
    """Chunk sizes on one kind of device."""

    working_bytes: int = 2**28  # temporary memory for rows, where no plan sets it
    rows_per_pass: int = 4096  # rows to multiply at a time in a pass over all of them
    matrix_free_rows: int = 8192  # the same for rows that are known by their products alone
    block_rows: int = 20_000  # rows per block of a projector, where neither it nor the rows set a size
    tile_rows: int = 1000  # rows and columns of a tile of a Gram matrix
    panel_columns: int = 256  # columns of a Cholesky factor that are computed at a time
    mirrored_columns: int = 256  # columns of a symmetric matrix that are copied into its other triangle at a time
    normal_bytes: int = 2**31  # products of examples that are held at a time while a normal matrix is summed
    lanczos_vectors: int = 32  # vectors per block of the Lanczos process


LIMITS = {
    "cpu": Limits(),
    "cuda": Limits(working_bytes=2**32, rows_per_pass=65536, tile_rows=4096, panel_columns=1024),
}


def limits(device: torch.device) -> Limits:
    """Return the chunk sizes of a device; those of a CPU for a kind that the table does not have."""
    return LIMITS.get(device.type, LIMITS["cpu"])


def double_is_fast(device: torch.device) -> bool:
    """Return whether float64 runs about as fast as float32 on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in _FAST_DOUBLE


def half_is_fast(device: torch.device) -> bool:
    """Return whether a device multiplies matrices of halves several times as fast as others, and adds in float32."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does per second. The ratios decide between methods; the plan's seconds follow from all of them."""

    single: float  # operations of float32 matrix products
    double: float  # operations of float64 matrix products
    narrow: float  # operations of products of ten-bit numbers
    bandwidth: float  # bytes
    transfer: float  # bytes from the host
    formed: float  # entries of Jacobian rows
    chunk: float  # seconds to form a chunk of rows, however small


# Round numbers for one machine of each kind. `python -m benchmarks.rates [--device cuda] [--threads 1]` prints those
# of another; on an H200: 5.1e13, 6.2e13, 7.1e14, 4.2e12, 5.5e10, 7.6e10, 2.7e-3 (with rows of a very small network).
_CPU = Rates(single=1.5e11, double=0.75e11, narrow=1.5e11, bandwidth=2e10, transfer=2e10, formed=1e9, chunk=3e-3)
_ONE_THREAD = Rates(
    single=0.75e11, double=0.375e11, narrow=0.75e11, bandwidth=1e10, transfer=1e10, formed=0.5e9, chunk=6e-3
)
_CUDA = Rates(single=4.5e13, double=4e13, narrow=6e14, bandwidth=3e12, transfer=2e10, formed=2e10, chunk=4e-2)
_CUDA_SINGLE = Rates(  # cards whose float64 is slow
    single=2e13, double=4e11, narrow=6e13, bandwidth=8e11, transfer=1e10, formed=1e10, chunk=4e-2
)


def rates_of(device: torch.device) -> Rates:
    """Return what a device does per second."""
    if device.type == "cuda":
        return _CUDA if double_is_fast(device) else _CUDA_SINGLE
    return _ONE_THREAD if torch.get_num_threads() == 1 else _CPU


def tile_rows(device: torch.device, working_bytes: int) -> int:
    """Return the rows of a tile of a Gram matrix, such that three float64 tiles fill half of the working bytes."""
    return max(1, min(limits(device).tile_rows, math.isqrt(working_bytes // 48)))


def compact_tile_rows(n_rows: int, device: torch.device, working_bytes: int) -> int:
    """Return the rows of a tile of a Gram matrix whose rows are computed for each tile: more, to compute them less."""
    least = tile_rows(device, working_bytes)
    return min(max(least, n_rows // 6), math.isqrt(working_bytes // 16), 4 * least)


def panel_columns(size: int, device: torch.device) -> int:
    """Return the columns per panel of a Cholesky factor of that size: an eighth, but enough for full speed."""
    return min(size, limits(device).panel_columns, max(256, size // 8))


class PieceCosts(NamedTuple):
    """What one piece costs."""

    n_bytes: int  # held in all
    gram_flops: float  # per entry of a Gram matrix
    product_flops: float  # per row and vector
    fixed_bytes: float = 0.0  # temporary bytes per row of a product, whatever it is multiplied with
    vector_bytes: float = 0.0  # temporary bytes per row and vector of a product
    entry_flops: float = 0.0  # to compute the entries of a row from what is held

    def product_bytes(self, n_vectors: int) -> float:
        """Return the temporary bytes per row of a product with ``n_vectors`` vectors."""
        return self.fixed_bytes + self.vector_bytes * n_vectors


@dataclass(frozen=True)
class RowCosts:
    """What rows cost in one way of storing them: bytes and floating-point operations.

    Rows that are formed share the working bytes W like this:

    =============  ===============================================================================
    held later     W to form them, W/2 in half precision
    "recompute"    W/2 for the rows, W/4 (more if the rows are few) to form them, W/4 for products
    "matrix_free"  W for the vectors and what the network computes from them
    =============  ===============================================================================
    """

    n_rows: int
    n_columns: int
    rows_per_example: int
    numbers_per_row: int  # that are stored
    dtype: torch.dtype
    device: torch.device
    working_bytes: int  # of the rows, unless a plan sets others
    storage: Storage
    pieces: tuple[PieceCosts, ...]  # of each range of columns
    full_bytes: int  # to hold all rows in full precision; 0 if they are held already
    held_bytes: int  # to hold them as `storage` says, on the device or the host; 0 if they are not held, or already
    normal_flops: float  # of the normal matrix of all rows
    example_bytes: int = 0  # temporary bytes per example while its rows are formed; 0 if they need not be
    example_flops: float = 0.0  # of the layers, forwards and backwards, while its rows are formed
    processes: int = 1  # that have as many rows each
    all_rows: int = 0  # of all processes; 0 if there are no others
    column_parts: int = 1  # processes that have as many columns each
    all_columns: int = 0  # of all processes; 0 if there are no others
    compact_bytes: int = 0  # to hold them as factors, from which products compute entries; 0 if that is not possible

    @property
    def whole_rows(self) -> int:
        """The rows of all processes."""
        return self.all_rows or self.n_rows

    @property
    def whole_columns(self) -> int:
        """The columns of all processes."""
        return self.all_columns or self.n_columns

    @property
    def is_alone(self) -> bool:
        """Whether one process has all rows and all columns."""
        return self.processes == self.column_parts == 1

    def products(self, n_vectors: int) -> float:
        """Operations of the products of all rows with vectors, and back."""
        return 2.0 * self.n_rows * n_vectors * self.product_flops

    @property
    def gram_flops(self) -> float:
        """Operations per entry of a Gram matrix."""
        return sum(piece.gram_flops for piece in self.pieces)

    @property
    def product_flops(self) -> float:
        """Operations per row and vector of a product."""
        return sum(piece.product_flops for piece in self.pieces)

    @property
    def entry_flops(self) -> float:
        """Operations per row to compute its entries from what is held."""
        return sum(piece.entry_flops for piece in self.pieces)

    @property
    def device_bytes(self) -> int:
        """Bytes of rows that are held on the device."""
        return self.held_bytes if self.storage in ("device", "half", "factors") else 0

    @property
    def _n_examples(self) -> int:
        return -(-self.n_rows // self.rows_per_example)

    @property
    def _row_bytes(self) -> int:
        """Bytes per example to hold its rows in full precision."""
        return max(1, self.full_bytes // self._n_examples)

    def least_working_bytes(self, n_vectors: int) -> int:
        """Return the least working bytes: enough for one example at a time."""
        if not self.example_bytes:
            return _LEAST_WORKING_BYTES
        if self.storage == "matrix_free":
            least = n_vectors * pushed_bytes(self.example_bytes, self.rows_per_example) + self._vector_bytes
        else:
            least = (4 if self.storage == "recompute" else 2) * max(self.example_bytes, self._row_bytes)
        return max(_LEAST_WORKING_BYTES, least)

    def forming_bytes(self, working_bytes: int) -> int:
        """Return the temporary bytes to form rows that are then held."""
        if self.storage in ("recompute", "matrix_free") or not self.example_bytes:
            return 0
        each = self.example_bytes * (2 if self.storage == "half" else 1)
        return max(each, min(working_bytes // each, self._n_examples) * each)

    def forming_chunks(self, working_bytes: int) -> int:
        """Return in how many chunks all rows are formed once; each takes its time, however small."""
        if not self.example_bytes:
            return 0
        share = {"half": 2, "recompute": 4}.get(self.storage, 1)
        return -(-self._n_examples // max(1, working_bytes // share // self.example_bytes))

    def transient_bytes(self, working_bytes: int, block_rows: int, n_vectors: int) -> tuple[int, int]:
        """Return the temporary bytes for the Gram matrix of a block, and for products with the block."""
        if self.storage == "matrix_free" and self.example_bytes:
            pushed = pushed_bytes(self.example_bytes, self.rows_per_example)
            pushed = min(working_bytes, max(n_vectors, _PUSHED_VECTORS) * pushed)
            rows = min(block_rows, working_bytes // self._vector_bytes) * self._vector_bytes
            return min(working_bytes, rows + pushed), pushed
        formed = self.storage == "recompute" and self.example_bytes > 0
        room = working_bytes // 4 if formed else working_bytes
        tile = min(block_rows, tile_rows(self.device, room))
        gram = min(room, 16 * tile**2 + min(room // 2, 16 * tile * self.numbers_per_row))
        if self.storage == "factors" or (self.storage == "half" and half_is_fast(self.device)):
            gram = room  # larger tiles, and as many columns at a time as there is room for
        products = min(room, int(block_rows * max(piece.product_bytes(n_vectors) for piece in self.pieces)))
        block = block_rows // self.rows_per_example
        if formed:
            gram += self._formed_bytes(working_bytes, block)
            products += self._formed_bytes(working_bytes, max(block, self._n_examples))  # to measure the residual
        if self.storage == "half" and self.example_bytes:  # the residual is measured on rows that are formed again
            products = max(products, self._formed_bytes(working_bytes, self._n_examples))
        return gram, products

    @property
    def _vector_bytes(self) -> int:
        return PRODUCT_COPIES * self.n_columns * self.dtype.itemsize

    def _formed_bytes(self, working_bytes: int, n_examples: int) -> int:
        """Return the bytes of the rows of some examples, and to form them, where they are not held."""
        rows = min(working_bytes // 2, n_examples * self._row_bytes)
        at_once = max(1, rows // self._row_bytes)
        room = min(forming_room(working_bytes, rows), at_once * self.example_bytes)
        return rows + max(self.example_bytes, room)


def forming_room(working_bytes: int, row_bytes: int) -> int:
    """Return the temporary bytes to form ``row_bytes`` bytes of rows: a quarter, or more if the rows are few."""
    return max(working_bytes // 4, working_bytes - working_bytes // 4 - 2 * row_bytes)


def pushed_bytes(example_bytes: int, rows_per_example: int) -> int:
    """Return the temporary bytes per example and vector of a matrix-free product."""
    return 2 * example_bytes // rows_per_example


def panel_bytes(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the temporary bytes of a Cholesky factorization in place."""
    panel, copies = panel_columns(size, device), 1
    if dtype == torch.float32 and half_is_fast(device):
        copies = 4  # scaled, and split twice
    return (copies * size * panel + 3 * panel**2) * dtype.itemsize


def normal_bytes(n_columns: int, device: torch.device) -> int:
    """Return the temporary bytes to sum and factor a normal matrix: its largest tile with a chunk, or a panel."""
    chunk = limits(device).normal_bytes if device.type == "cuda" else 0  # elsewhere the working bytes count it
    return max(2 * n_columns**2 + chunk, panel_bytes(n_columns, torch.float64, device))


# --- free memory ------------------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, or for the process on the host."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        share = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved  # what torch may still take
        return max(0, min(free, share)) + reserved - torch.cuda.memory_allocated(device)  # it holds the rest for us
    candidates = [8 * 2**30]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        candidates = [int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024]
    with contextlib.suppress(OSError, ValueError):  # a container may allow less than the machine has
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        candidates.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(2**28, min(candidates))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in _SENTENCES)


def give_back() -> None:
    """Free what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class OutOfMemory:
    """The outcome of an attempt for which there was too little memory."""

    error: BaseException


def attempt(work: Callable[[], T]) -> T | OutOfMemory:
    """Return what ``work`` returns; where memory runs out, free all that it held and return the error."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = error.with_traceback(None)  # its frames hold what is to be freed
        failure.__context__ = None
    give_back()
    return OutOfMemory(failure)
