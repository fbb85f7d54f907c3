r"""The normal matrix :math:`A^\top D^{-2} A` of rows.

Where rows are outer products :math:`g_{no} \otimes a_n`, the sum over the outputs is taken first: with
:math:`M_n = \sum_o g_{no} g_{no}^\top`, a tile of the normal matrix is :math:`\sum_n M_n \otimes a_n a_n^\top`, one
matrix product over the examples instead of one over the rows. For two factors of the same layer both sides are
symmetric, so only a quarter of the products is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.limits import limits
from nullbayes.linalg.pieces import Factors
from nullbayes.linalg.rows import Rows


def normal_matrix(rows: Rows, scale: Tensor | None = None, taken: Tensor | None = None) -> Tensor:  # (R,) -> (P, P)
    """Return ``A.T @ diag(scale)² @ A``, in float64. ``taken`` (bool, one per example) leaves other examples out."""
    rows.check_whole("The normal matrix A⊤A")
    result = torch.zeros(rows.n_columns, rows.n_columns, dtype=torch.float64, device=rows.device)
    sizes = limits(rows.device)
    working_bytes = min(rows.working_bytes, sizes.normal_bytes)
    for where, block in rows.blocks(rows.rows_per_normal_pass):
        factors = block.factors()
        outputs = factors[0].gradients.shape[1]
        weights = None if scale is None else scale[where].view(-1, outputs)
        if taken is not None:
            here = taken[where.start // outputs : where.stop // outputs].nonzero()[:, 0]
            factors = [
                Factors(gradients[here], None if activations is None else activations[here], column)
                for gradients, activations, column in factors
            ]
            weights = None if weights is None else weights[here]
        for i, left in enumerate(factors):
            for right in factors[: i + 1]:
                _add_tile(left, right, weights, result, working_bytes)
    result = rows.total(result)
    for start in range(0, rows.n_columns, sizes.mirrored_columns):  # only the lower triangle was summed
        stop = min(rows.n_columns, start + sizes.mirrored_columns)
        corner = result[start:stop, start:stop].tril()
        result[start:stop, start:stop] = corner + corner.tril(-1).T
        result[start:stop, stop:] = result[stop:, start:stop].T
    return result


def _add_tile(left: Factors, right: Factors, weights: Tensor | None, result: Tensor, working_bytes: int) -> None:
    """Add the products of two factors to the tile of their columns in the lower triangle."""
    if left.column < right.column:
        left, right = right, left
    n, outputs, q = left.gradients.shape
    s = right.gradients.shape[2]
    r, t = (1 if f.activations is None else f.activations.shape[1] for f in (left, right))
    tile = result[left.column : left.column + q * r, right.column : right.column + s * t]
    same = left.column == right.column and r > 1
    pairs = [torch.tril_indices(size, size, device=result.device) for size in (q, r)] if same else []
    total: Tensor | None = None
    width = 16 * outputs * (q + s)  # bytes per example
    if not r == t == 1:
        width += 16 * (q * s + r * t)
    step = max(1, min(n, working_bytes // width))
    for start in range(0, n, step):
        part = slice(start, start + step)
        g, h = (f.gradients[part].to(result.dtype) for f in (left, right))
        if weights is not None:
            g, h = (x * weights[part, :, None].to(result.dtype) for x in (g, h))
        if left.activations is None and right.activations is None:
            tile.addmm_(g.reshape(-1, q).T, h.reshape(-1, s))
            continue
        a, b = (_activations(f, part, result.dtype) for f in (left, right))
        products = g.mT @ h  # (n, q, s)
        if same:
            (i, j), (k, l) = pairs
            gradients, activations = products[:, i, j], a[:, k] * a[:, l]
        else:
            gradients, activations = products.flatten(1), (a[:, :, None] * b[:, None, :]).flatten(1)
        total = gradients.T @ activations if total is None else total.addmm_(gradients.T, activations)
    if total is None:
        return
    if not same:
        tile.view(q, r, s, t).add_(total.view(q, s, r, t).transpose(1, 2))
        return
    gradient_place, activation_place = (_places(pair, size) for pair, size in zip(pairs, (q, r), strict=True))
    for row in range(q):  # one at a time: the tile itself may be most of the memory
        entries = total[gradient_place[row]][:, activation_place.flatten()].view(q, r, r)
        tile[row * r : (row + 1) * r].view(r, q, r).add_(entries.transpose(0, 1))


def _activations(factors: Factors, part: slice, dtype: torch.dtype) -> Tensor:  # (n, r)
    if factors.activations is None:
        return factors.gradients.new_ones(len(factors.gradients[part]), 1, dtype=dtype)
    return factors.activations[part].to(dtype)


def _places(pair: Tensor, size: int) -> Tensor:  # (2, size (size + 1) / 2) -> (size, size)
    """Return where each entry of a symmetric matrix lies among its packed lower triangle."""
    places = torch.empty(size, size, dtype=torch.int64, device=pair.device)
    order = torch.arange(pair.shape[1], device=pair.device)
    places[pair[0], pair[1]] = order
    places[pair[1], pair[0]] = order
    return places
