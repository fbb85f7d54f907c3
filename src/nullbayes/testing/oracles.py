r"""Dense answers to compare with: slow, simple, and written without any of the library.

They go through NumPy's singular value decomposition, where the library goes through Gram matrices and sweeps.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["kernel_dimension", "kernel_projector"]


def kernel_projector(matrix: Tensor, rtol: float | None = None) -> Tensor:
    r"""Return the orthogonal projector :math:`I - A^+ A` on the kernel of :math:`A`, as a dense matrix.

    Parameters
    ----------
    matrix : Tensor
        :math:`A` of shape (R, P).
    rtol : float, optional
        Singular values up to ``rtol`` times the largest count as zero. The default is ``max(R, P)`` times the
        eps of the dtype of ``matrix``: what is smaller may be rounding of its entries.

    Returns
    -------
    Tensor
        The projector (P, P), float64, on the device of ``matrix``. It costs :math:`O(R P \min(R, P) + P^3)`.
    """
    basis = _kernel_basis(matrix, rtol)
    # Z Z^T instead of I - V V^T: the same matrix, without cancellation where the kernel is small.
    return torch.from_numpy(basis.T @ basis).to(matrix.device)


def kernel_dimension(matrix: Tensor, rtol: float | None = None) -> int:
    r"""Return the dimension :math:`P - \mathrm{rank}\, A` of the kernel of :math:`A`.

    Parameters
    ----------
    matrix : Tensor
        :math:`A` of shape (R, P).
    rtol : float, optional
        As in `kernel_projector`.
    """
    return len(_kernel_basis(matrix, rtol))


def _kernel_basis(matrix: Tensor, rtol: float | None) -> npt.NDArray[np.float64]:
    """Return an orthonormal basis of the kernel in its rows."""
    dense = matrix.detach().cpu().double().numpy()
    if rtol is None:
        rtol = max(dense.shape) * torch.finfo(matrix.dtype).eps
    _, sigma, right = np.linalg.svd(dense)
    rank = int((sigma > rtol * sigma.max(initial=0.0)).sum())
    basis: npt.NDArray[np.float64] = right[rank:]
    return basis
