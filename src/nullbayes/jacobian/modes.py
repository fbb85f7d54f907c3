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

    Where forward mode is missing, or is wrong for an operation, predictions go by rows as well; a network without it is
    refused where it is ``needed``. Reverse mode was compared with differences before.
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
            why = str(error).partition("\n")[0]
            msg = f'storage="matrix_free" needs forward mode, which this network has not ({why}): use "recompute".'
            raise ModelError(msg) from error
        return
    back, eps = block.mv(vector), torch.finfo(theta.dtype).eps
    if float((ahead - back).norm()) <= eps**0.4 * float(ahead.norm() + back.norm()):
        return
    network.forward_mode = False
    if needed:
        msg = 'storage="matrix_free" needs forward mode, which torch has wrong for this network: use "recompute".'
        raise ModelError(msg)
