"""An operation that has a backward pass only: no forward mode and no `vmap`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient
