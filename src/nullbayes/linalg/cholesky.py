r"""Cholesky factors in the place of a matrix, and solving with them by matrix products alone.

A factor is computed a panel at a time, so that no second matrix is needed. Its diagonal blocks are replaced by their
inverses: substitution then consists of matrix products, which devices do at full speed, where triangular solves with a
few right-hand sides crawl. Inverting blocks of a Cholesky factor costs the square root of the condition number, as
much as the factor itself has lost.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_PANEL = {"cpu": 256, "cuda": 1024}  # columns of a factor computed at a time, at most


def cholesky_(matrix: Tensor) -> bool:
    """Overwrite a symmetric matrix by its Cholesky factor, for :func:`cholesky_solve`; only its lower triangle is read.

    Diagonal blocks hold the inverse of the factor's own, and what lies above them means nothing. Returns False, with
    the matrix spoiled, if it is not positive definite in its own precision.
    """
    edges = _edges(matrix)
    for start, stop in pairwise(edges):
        corner, info = torch.linalg.cholesky_ex(matrix[start:stop, start:stop])
        if int(info) != 0:
            return False
        eye = torch.eye(stop - start, dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(corner, eye, upper=False)
        matrix[start:stop, start:stop] = inverse
        below = matrix[stop:, start:stop]
        below.copy_(below @ inverse.mT)
        for left, right in pairwise(edges[edges.index(stop) :: 2] + edges[-1:]):  # trapezoids of what is left
            if left < right:
                matrix[left:, left:right].addmm_(
                    matrix[left:, start:stop], matrix[left:right, start:stop].mT, alpha=-1.0
                )
    return True


def cholesky_solve(factor: Tensor, vectors: Tensor) -> Tensor:  # (m, m), (S, m) -> (S, m)
    """Solve with the matrix that :func:`cholesky_` has overwritten by ``factor``, for each vector."""
    solved = vectors.T.clone(memory_format=torch.contiguous_format)  # (m, S)
    blocks = list(pairwise(_edges(factor)))
    for start, stop in blocks:
        part = solved[start:stop]
        if start:
            part = torch.addmm(part, factor[start:stop, :start], solved[:start], alpha=-1.0)
        solved[start:stop] = factor[start:stop, start:stop] @ part
    for start, stop in reversed(blocks):
        part = solved[start:stop]
        if stop < len(factor):
            part = torch.addmm(part, factor[stop:, start:stop].mT, solved[stop:], alpha=-1.0)
        solved[start:stop] = factor[start:stop, start:stop].mT @ part
    return solved.T


def panel_bytes(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return what :func:`cholesky_` takes beside the matrix."""
    panel = _panel(size, device)
    return (size * panel + 3 * panel**2) * dtype.itemsize


def _panel(size: int, device: torch.device) -> int:
    """Return how many columns to take at a time: few beside the matrix, enough for full speed."""
    most = _PANEL.get(device.type, 256)
    return min(size, most, max(256, size // 8))


def _edges(matrix: Tensor) -> list[int]:
    return [*range(0, len(matrix), _panel(len(matrix), matrix.device)), len(matrix)]
