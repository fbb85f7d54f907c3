r"""A subsampled randomized Hadamard transform: a random map to fewer dimensions that preserves lengths.

:math:`S = \sqrt{n/s}\; R\,H D`: random signs, an orthonormal Hadamard transform of the next power of two :math:`n`,
and :math:`s` of its entries. It keeps the lengths of all vectors in a subspace of :math:`k` dimensions to a factor
:math:`1 \pm \epsilon` once :math:`s` is of the order :math:`k \log k / \epsilon^2` (Ailon and Chazelle 2009; Tropp
2011); with :math:`s = n` it is orthogonal. Applying it takes :math:`n \log n` operations, holding it :math:`n + s`
numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nullbayes.errors import SettingsError

_FACTOR = 32  # rows of the factors of a Hadamard matrix


class Sketch:
    """A random map from ``n_columns`` to ``size`` numbers.

    Parameters
    ----------
    n_columns, size : int
        Length of the vectors before and after; ``size`` is at most the next power of two.
    seed : int
        The same seed gives the same map, on any device.
    device : torch.device
        Where the vectors lie.
    """

    def __init__(self, n_columns: int, size: int, seed: int, device: torch.device) -> None:
        self.n_columns, self.size = n_columns, size
        self.padded = padded_size(n_columns)
        if not 1 <= size <= self.padded:
            msg = f"A sketch of {n_columns:,} numbers must have between 1 and {self.padded:,} of them, not {size:,}."
            raise SettingsError(msg)
        generator = torch.Generator().manual_seed(seed)
        coins = torch.randint(2, (n_columns,), generator=generator, device="cpu", dtype=torch.int8)
        self._signs = (2 * coins - 1).to(device)
        self._taken = torch.randperm(self.padded, generator=generator, device="cpu")[:size].sort().values.to(device)

    def __call__(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, size)
        """Sketch each vector."""
        spread = vectors.new_zeros(len(vectors), self.padded)
        spread[:, : self.n_columns] = vectors * self._signs
        return hadamard(spread)[:, self._taken] * math.sqrt(self.padded / self.size)


def padded_size(n_columns: int) -> int:
    """Return the next power of two: the largest size of a sketch."""
    return 1 << (n_columns - 1).bit_length()


def hadamard(vectors: Tensor) -> Tensor:  # (S, n), n a power of two
    """Return the orthonormal Hadamard transform of each vector.

    It is a Kronecker product of small ones, each of which is one matrix product: few passes over memory.
    """
    n, done, image = vectors.shape[1], 1, vectors
    while done < n:
        size = min(_FACTOR, n // done)
        factor = _hadamard_matrix(size).to(vectors)
        image = image.reshape(-1, size) @ factor if done == 1 else factor @ image.reshape(-1, size, done)
        done *= size
    return image.view_as(vectors)


def _hadamard_matrix(size: int) -> Tensor:  # (size, size), orthonormal
    two, matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu"), torch.ones(1, 1, device="cpu")
    while len(matrix) < size:
        matrix = torch.kron(matrix, two)
    return matrix.double() / math.sqrt(size)
