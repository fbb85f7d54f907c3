r"""A Kronecker product for each layer: correlations between its inputs, times those between its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nullbayes.linalg.curvature.base import Curvature, padded


class Factor(NamedTuple):
    r"""A block :math:`B \otimes A` over columns that are an (out, in) matrix, by the eigenpairs of both."""

    column: int  # the first of out * in
    left: Tensor  # (out, out), eigenvectors in columns
    left_values: Tensor  # (out,)
    right: Tensor  # (in, in)
    right_values: Tensor  # (in,)

    @property
    def where(self) -> slice:
        """Its columns."""
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
    factors : sequence of Factor
        On disjoint columns that leave none out.
    """

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.factors = tuple(factors)
        self.n_columns = max(factor.where.stop for factor in factors)
        self.rank = sum(int((factor.values > 0).sum()) for factor in factors)

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Shrink the noise in the eigenbasis of each block."""
        result = torch.empty_like(noise)
        for factor in self.factors:
            shrunk = factor.turned(noise) / (factor.values + alpha).sqrt()
            result[:, factor.where] = (factor.left @ shrunk @ factor.right.T).flatten(1)
        return result

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Weigh the squares in the eigenbasis of each block."""
        parts = [(factor.turned(rows).square() / (factor.values + alpha)).sum((1, 2)) for factor in self.factors]
        return torch.stack(parts).sum(0)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the products of the eigenvalues."""
        return padded(torch.cat([factor.values.flatten() for factor in self.factors]), self.n_columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the eigenpairs of all factors, one after the other."""
        names = ("left", "left_values", "right", "right_values")
        found = {name: torch.cat([getattr(f, name).flatten() for f in self.factors]) for name in names}
        sizes = [[f.column, len(f.left), len(f.right)] for f in self.factors]
        return {"sizes": torch.tensor(sizes, device="cpu"), **found}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Kronecker:
        """Build the curvature again from its :meth:`tensors`."""
        sizes = [[int(n) for n in row] for row in tensors["sizes"].tolist()]
        outs, ins = [row[1] for row in sizes], [row[2] for row in sizes]
        left, right = (
            tensors[name].split([n * n for n in widths]) for name, widths in (("left", outs), ("right", ins))
        )
        left_values, right_values = tensors["left_values"].split(outs), tensors["right_values"].split(ins)
        return cls([
            Factor(column, left[i].view(out, out), left_values[i], right[i].view(n, n), right_values[i])
            for i, (column, out, n) in enumerate(sizes)
        ])  # fmt: skip


def decomposed(column: int, left: Tensor, right: Tensor) -> Factor:  # (out, out), (in, in)
    """Return the eigenpairs of a Kronecker product of two positive semi-definite matrices."""
    left_values, left_vectors = torch.linalg.eigh(left)
    right_values, right_vectors = torch.linalg.eigh(right)
    return Factor(column, left_vectors, left_values.clamp_min(0.0), right_vectors, right_values.clamp_min(0.0))
