"""Products with the rows of examples by forward and reverse mode, checked: the modes must agree, numbers be finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.batches import take_examples
from nullbayes.jacobian.checks import check_rows, seem_finite
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import pull, push
from nullbayes.linalg.held import HeldBlock
from nullbayes.memory import is_out_of_memory
from nullbayes.precision import full_precision
from nullbayes.types import RowFunction


@full_precision()
def compare_modes(
    network: Network, function: RowFunction, x: Any, y: Tensor, block: HeldBlock, *, needed: bool
) -> None:
    """Compare a product with the rows of some examples, by reverse mode, with the same by forward mode.

    Where torch has no forward mode for an operation, or a wrong one, predictions are made from rows as well; such a
    network is refused if forward mode is ``needed``. Reverse mode was compared with differences before.
    """
    theta, why = network.theta, ""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, len(theta), generator=generator, dtype=torch.float64, device="cpu").to(theta)
    try:
        ahead = push(function, theta, x, y, vector).flatten(1)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        why = f"this network has not ({str(error).partition(chr(10))[0]})"
    else:
        back, eps = block.mv(vector), torch.finfo(theta.dtype).eps
        if float((ahead - back).norm()) > eps**0.4 * float(ahead.norm() + back.norm()):
            why = "torch has wrong for this network"
    if why:
        network.forward_mode = False
    if why and needed:
        msg = f'storage="products" needs forward mode, which {why}: use "form".'
        raise ModelError(msg)


def push_range(
    function: RowFunction, theta: Tensor, examples: Examples, start: int, stop: int, vectors: Tensor
) -> Tensor:  # (S, P) -> (S, n, O)
    """Multiply the rows of a range of examples with vectors, by forward mode."""
    pushed = push(function, theta, *examples.read(start, stop), vectors)
    if not seem_finite([pushed]) and torch.isfinite(vectors).all():
        check_rows(examples, start, stop, [pushed.transpose(0, 1)])
    return pushed


def pull_range(
    function: RowFunction, theta: Tensor, examples: Examples, start: int, stop: int, weights: Tensor
) -> Tensor:  # (S, n, O) -> (S, P)
    """Multiply weights with the rows of a range of examples, by reverse mode."""
    x, y = examples.read(start, stop)
    pulled = pull(function, theta, x, y, weights)
    if not seem_finite([pulled]) and torch.isfinite(weights).all():
        for i in range(stop - start):  # the sum over the examples does not say which
            alone = pull(function, theta, take_examples(x, i, i + 1), y[i : i + 1], weights[:, i : i + 1])
            check_rows(examples, start + i, start + i + 1, [alone[None]])
    return pulled
