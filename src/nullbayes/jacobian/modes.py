"""Forward mode, for predictions, and reverse mode, for rows, compared: torch may know only one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import ModelError
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import push
from nullbayes.linalg.held import HeldBlock
from nullbayes.memory import is_out_of_memory
from nullbayes.precision import full_precision
from nullbayes.types import RowFunction


@full_precision()
def compare_modes(
    network: Network, function: RowFunction, x: Any, y: Tensor, block: HeldBlock, *, needed: bool
) -> None:
    """Compare a product with the rows of some examples, by reverse mode, with the same by forward mode.

    Where forward mode is missing, or is wrong for an operation, predictions go by rows as well. Refuse a network that
    reverse mode sees wrongly, and one without forward mode where that is ``needed``.
    """
    theta = network.theta
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, len(theta), generator=generator, dtype=torch.float64, device="cpu").to(theta)
    try:
        ahead = push(function, theta, x, y, vector).flatten(1)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        network.forward_mode = False
        if needed:
            msg = f'storage="products" needs forward mode, which this network has not ({error}): use "form".'
            raise ModelError(msg) from error
        return
    back, eps = block.mv(vector), torch.finfo(theta.dtype).eps
    if float((ahead - back).norm()) <= eps**0.4 * float(ahead.norm() + back.norm()):
        return
    length = eps ** (1 / 3) * (1 + float(theta.norm())) / float(vector.norm())
    with torch.no_grad():
        up, down = (function(theta + sign * length * vector[0], x, y).flatten() for sign in (1, -1))
    slope = (up - down) / (2 * length)
    if float((slope - back).norm()) > 0.5 * float((slope - ahead).norm()):
        msg = (
            "Part of the network runs under torch.no_grad(), so that its parameters look as if they had no "
            "influence: leave them out with parameters=... or requires_grad_(False), or run it with gradients."
        )
        raise ModelError(msg)
    network.forward_mode = False
    if needed:
        msg = 'storage="products" needs forward mode, which torch has wrong for this network: use "form".'
        raise ModelError(msg)
