"""A matrix in memory as rows."""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.linalg.held import HeldRows
from nullbayes.linalg.pieces import DensePiece


class DenseRows(HeldRows):
    """Use a matrix in memory as rows.

    Parameters
    ----------
    matrix : Tensor (R, P)
        The entries; they are not copied.
    block_rows : int, optional
        The block size that a projector takes unless its settings name another.

    Raises
    ------
    SettingsError
        If the matrix is not a dense floating-point tensor of finite numbers with at least one row and one column.

    Examples
    --------
    >>> import torch
    >>> rows = DenseRows(torch.eye(3, 5))
    >>> rows.norms(torch.ones(1, 5))
    tensor([1.7321], dtype=torch.float64)
    """

    def __init__(self, matrix: Tensor, block_rows: int | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.layout != torch.strided:
            what = f"a {matrix.layout} one" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
            msg = f"DenseRows takes a dense tensor, not {what}: torch.as_tensor(matrix) or matrix.to_dense() makes one."
            raise SettingsError(msg)
        if matrix.ndim != 2 or 0 in matrix.shape:
            msg = f"DenseRows takes a matrix of at least one row and one column, not shape {tuple(matrix.shape)}."
            raise SettingsError(msg)
        if not matrix.is_floating_point():
            msg = f"DenseRows takes floating-point entries, not {matrix.dtype}: convert it with matrix.double()."
            raise SettingsError(msg)
        if not torch.isfinite(matrix).all():
            msg = "DenseRows found NaN or Inf among the entries of the matrix."
            raise SettingsError(msg)
        if block_rows is not None and block_rows < 1:
            msg = f"block_rows must be at least 1, not {block_rows}."
            raise SettingsError(msg)
        matrix = matrix.detach()
        n_rows, n_columns = matrix.shape
        super().__init__(
            [DensePiece(matrix, 0)], n_rows=n_rows, n_columns=n_columns, like=matrix, block_rows=block_rows
        )
