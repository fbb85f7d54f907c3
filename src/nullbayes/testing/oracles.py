"""Dense reference results for comparison: slow, simple, and independent of the library.

They use NumPy's singular value decomposition, where the library uses Gram matrices and sweeps.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["kernel_dimension", "kernel_projector"]


def kernel_projector(matrix: Tensor, rtol: float | None = None) -> Tensor:
    r"""Return the orthogonal projector :math:`I - A^+ A` onto the null space of :math:`A` as a dense matrix.

    Parameters
    ----------
    matrix : Tensor
        :math:`A` of shape (R, P).
    rtol : float, optional
        Singular values up to ``rtol`` times the largest count as zero. The default is ``max(R, P)`` times the machine
        epsilon of the dtype of ``matrix``.

    Returns
    -------
    Tensor
        The projector (P, P), float64, on the device of ``matrix``. It costs :math:`O(R P \min(R, P) + P^3)`.

    Examples
    --------
    >>> kernel_projector(torch.tensor([[1.0, 0.0]]))
    tensor([[0., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    basis = _kernel_basis(matrix, rtol)
    # Z Z^T instead of I - V V^T: the same matrix, without cancellation if the null space is small.
    return torch.from_numpy(basis.T @ basis).to(matrix.device)


def kernel_dimension(matrix: Tensor, rtol: float | None = None) -> int:
    r"""Return the dimension :math:`P - \mathrm{rank}\, A` of the null space of :math:`A`.

    Parameters
    ----------
    matrix : Tensor
        :math:`A` of shape (R, P).
    rtol : float, optional
        As in `kernel_projector`.

    Returns
    -------
    int
        The dimension.

    Examples
    --------
    >>> kernel_dimension(torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]))
    2
    """
    return len(_kernel_basis(matrix, rtol))


def _kernel_basis(matrix: Tensor, rtol: float | None) -> npt.NDArray[np.float64]:
    """Return an orthonormal basis of the null space, one vector per row."""
    dense = matrix.detach().cpu().double().numpy()
    if rtol is None:
        rtol = max(dense.shape) * torch.finfo(matrix.dtype).eps
    _, sigma, right = np.linalg.svd(dense)
    rank = int((sigma > rtol * sigma.max(initial=0.0)).sum())
    basis: npt.NDArray[np.float64] = right[rank:]
    return basis
