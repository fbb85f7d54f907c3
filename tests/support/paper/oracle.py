"""Dense float64 answers, written without any of the library: loops over `torch.autograd.grad`, then NumPy and SciPy.

Matrices are small enough here to be formed, so every quantity is computed from its definition: Jacobians a row at a
time, projectors by singular value decomposition, posteriors by an inverse.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Matrix = npt.NDArray[np.float64]

# --- derivatives of a network ---


def flat_gradient(value: Tensor, model: nn.Module) -> Matrix:
    """The gradient of one number with respect to all parameters, zeros where it does not depend on them."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    return torch.cat([piece.reshape(-1) for piece in pieces]).cpu().numpy()


def jacobian(model: nn.Module, x: Tensor) -> Matrix:
    """The output Jacobian (N O, P): one call of autograd for each output of each example."""
    return np.stack([flat_gradient(output, model) for example in x for output in model(example[None])[0]])


def loss_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Matrix:
    """The loss Jacobian (N, P): one call of autograd for each example; ``loss`` takes outputs (1, O)."""
    pairs = zip(x, y, strict=True)
    return np.stack([flat_gradient(loss(model(a[None]), b[None]).sum(), model) for a, b in pairs])


def parameters(model: nn.Module) -> Matrix:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu().numpy()


# --- kernels ---


def rank(matrix: Matrix) -> int:
    return int(np.linalg.matrix_rank(matrix))


def image_projector(matrix: Matrix) -> Matrix:
    """The projector on the row space, A⁺A."""
    return np.linalg.pinv(matrix, rcond=max(matrix.shape) * np.finfo(float).eps) @ matrix


def kernel_projector(matrix: Matrix) -> Matrix:
    """The projector on the kernel, Z Z⊤ with Z the right singular vectors beyond the rank."""
    _, _, right = np.linalg.svd(matrix)
    basis = right[rank(matrix) :]
    return basis.T @ basis


def intersection_projector(projectors: Sequence[Matrix]) -> Matrix:
    """The projector on what all subspaces share: where the mean of their projectors has the eigenvalue 1."""
    values, vectors = np.linalg.eigh(sum(projectors) / len(projectors))
    shared = vectors[:, values > 1 - 1e-9]
    return shared @ shared.T


def friedrichs_cosine(first: Matrix, second: Matrix) -> float:
    """Cosine of the angle between two subspaces, given by projectors, outside what they share (Friedrichs)."""
    return float(np.linalg.norm(first @ second - intersection_projector([first, second]), 2))


def minimal_cosine(first: Matrix, second: Matrix) -> float:
    """Cosine of the smallest angle between combinations of rows of two matrices (Dixmier; Lemma 4.1)."""
    return float(np.linalg.norm(image_projector(first) @ image_projector(second), 2))


# --- posteriors ---


def laplace_covariance(rows: Matrix, alpha: float) -> Matrix:
    """The covariance of linearized Laplace, (A⊤A + α I)⁻¹."""
    return np.linalg.inv(rows.T @ rows + alpha * np.eye(rows.shape[1]))


def projected_covariance(rows: Matrix, alpha: float) -> Matrix:
    return kernel_projector(rows) / alpha


def output_variance(rows_at_x: Matrix, covariance: Matrix, n_outputs: int) -> Matrix:
    """The variances (N, O) of the linearized outputs, the diagonal of J(x) Σ J(x)⊤."""
    return np.einsum("np,pq,nq->n", rows_at_x, covariance, rows_at_x).reshape(-1, n_outputs)
