r"""Curvatures with structure: the diagonal alone, or a Kronecker product for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nullbayes.linalg.curvature.base import Curvature, padded
from nullbayes.linalg.rows import Rows
from nullbayes.linalg.spectral import eigh
from nullbayes.precision import full_precision


class Diagonal(Curvature):
    """A diagonal matrix: parameters vary independently of each other.

    Parameters
    ----------
    diagonal : Tensor (P,)
        The entries of the diagonal.
    """

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal
        self.n_columns = len(diagonal)
        self.rank = int((diagonal > 0).sum())

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Scale each number by its own standard deviation."""
        return noise / (self.diagonal + alpha).sqrt()

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Weight the square of each entry by its variance."""
        return rows.square() @ (1.0 / (self.diagonal + alpha))

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the entries of the diagonal."""
        return padded(self.diagonal, self.n_columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the entries of the diagonal."""
        return {"diagonal": self.diagonal}


@full_precision()
def column_squares(rows: Rows) -> Tensor:  # (P,)
    r"""Return the diagonal of :math:`A^\top A`, the sum of the squares in each column, in one pass over the rows.

    Where rows are outer products, the entries are never formed: squares of gradients and activations are multiplied.
    """
    result = torch.zeros(rows.n_columns, dtype=torch.float64, device=rows.device)
    for _, block in rows.blocks(rows.rows_per_pass):
        for gradients, activations, column in block.factors():
            squares = gradients.double().square().sum(1)  # (n, q)
            if activations is None:
                result[column : column + squares.shape[1]] += squares.sum(0)
            else:
                share = squares.T @ activations.double().square()
                result[column : column + share.numel()] += share.flatten()
    return result.to(rows.dtype)


class KroneckerBlock(NamedTuple):
    r"""The eigenpairs of a block :math:`B \otimes A`, whose columns are the entries of an (out, in) matrix."""

    column: int  # the first of its out * in columns
    left: Tensor  # (out, out), eigenvectors in columns
    left_values: Tensor  # (out,)
    right: Tensor  # (in, in)
    right_values: Tensor  # (in,)

    @property
    def where(self) -> slice:
        """The columns of the block."""
        return slice(self.column, self.column + len(self.left) * len(self.right))

    @property
    def values(self) -> Tensor:  # (out, in)
        """The eigenvalues of the block."""
        return self.left_values[:, None] * self.right_values

    def turned(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, out, in)
        """Return the block's part of each vector in its eigenbasis."""
        part = vectors[:, self.where].reshape(len(vectors), len(self.left), len(self.right))
        return self.left.T @ part @ self.right


class Kronecker(Curvature):
    """A block diagonal matrix of Kronecker products.

    Parameters
    ----------
    blocks : sequence of KroneckerBlock
        Blocks on disjoint columns, which together cover all columns.
    """

    def __init__(self, blocks: Sequence[KroneckerBlock]) -> None:
        self.blocks = tuple(blocks)
        self.n_columns = max(block.where.stop for block in blocks)
        self.rank = sum(int((block.values > 0).sum()) for block in blocks)

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Scale the noise in the eigenbasis of each block."""
        result = torch.empty_like(noise)
        for block in self.blocks:
            shrunk = block.turned(noise) / (block.values + alpha).sqrt()
            result[:, block.where] = (block.left @ shrunk @ block.right.T).flatten(1)
        return result

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Weight the squares in the eigenbasis of each block."""
        parts = [(block.turned(rows).square() / (block.values + alpha)).sum((1, 2)) for block in self.blocks]
        return torch.stack(parts).sum(0)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the products of the eigenvalues of both factors."""
        return padded(torch.cat([block.values.flatten() for block in self.blocks]), self.n_columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the eigenpairs of all blocks, concatenated."""
        names = ("left", "left_values", "right", "right_values")
        found = {name: torch.cat([getattr(f, name).flatten() for f in self.blocks]) for name in names}
        sizes = [[f.column, len(f.left), len(f.right)] for f in self.blocks]
        return {"sizes": torch.tensor(sizes, device="cpu"), **found}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the curvature from its :meth:`tensors`."""
        sizes = [[int(n) for n in row] for row in tensors["sizes"].tolist()]
        outs, ins = [row[1] for row in sizes], [row[2] for row in sizes]
        left, right = (
            tensors[name].split([n * n for n in widths]) for name, widths in (("left", outs), ("right", ins))
        )
        left_values, right_values = tensors["left_values"].split(outs), tensors["right_values"].split(ins)
        blocks = [
            KroneckerBlock(column, left[i].view(out, out), left_values[i], right[i].view(n, n), right_values[i])
            for i, (column, out, n) in enumerate(sizes)
        ]
        return cls(blocks)


def decomposed(column: int, left: Tensor, right: Tensor) -> KroneckerBlock:  # (out, out), (in, in)
    """Return the eigenpairs of a Kronecker product of two positive semi-definite matrices."""
    left_values, left_vectors = eigh(left)
    right_values, right_vectors = eigh(right)
    return KroneckerBlock(column, left_vectors, left_values.clamp_min(0.0), right_vectors, right_values.clamp_min(0.0))
