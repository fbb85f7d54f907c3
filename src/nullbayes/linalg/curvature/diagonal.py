r"""The diagonal alone: parameters that do not know of each other."""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.linalg.curvature.base import Curvature, padded
from nullbayes.linalg.rows import Rows
from nullbayes.precision import full_precision


class Diagonal(Curvature):
    """A diagonal matrix.

    Parameters
    ----------
    diagonal : Tensor (P,)
        Its entries.
    """

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal
        self.n_columns = len(diagonal)
        self.rank = int((diagonal > 0).sum())

    def sample(self, noise: Tensor, alpha: float) -> Tensor:
        """Scale each number."""
        return noise / (self.diagonal + alpha).sqrt()

    def variance(self, rows: Tensor, alpha: float) -> Tensor:
        """Weigh the squares."""
        return rows.square() @ (1.0 / (self.diagonal + alpha))

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return the entries."""
        return padded(self.diagonal, self.n_columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return the entries."""
        return {"diagonal": self.diagonal}


@full_precision()
def column_squares(rows: Rows) -> Tensor:  # (P,)
    r"""Return the diagonal of :math:`A^\top A`: the sum of the squares in each column, in one pass.

    Where rows are outer products, the squares of gradients and activations are summed first.
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
