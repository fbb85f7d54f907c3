"""A function with fewer outputs: random combinations of all that it has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nullbayes.types import RowFunction

_OUTPUTS = 16  # that a function may have before they are combined


class Narrowed:
    """The function itself if it has few outputs, else 16 random combinations of them.

    What is found out about the combinations holds for every output: each is part of all of them.

    Parameters
    ----------
    function : RowFunction
        ``(flat parameters, inputs, targets) -> (n, O)``.
    """

    def __init__(self, function: RowFunction) -> None:
        self.function = function
        self.outputs = 0  # O, once the function was called
        self._weights: Tensor | None = None  # (O, 16)

    @property
    def width(self) -> int:
        """How many outputs are left."""
        return min(self.outputs, _OUTPUTS)

    def __call__(self, flat: Tensor, x: Any, y: Tensor) -> Tensor:  # (n, 16), or (n, O) if that is less
        """Evaluate the function, and combine its outputs."""
        values = self.function(flat, x, y)
        self.outputs = values.shape[1]
        if self.outputs <= _OUTPUTS:
            return values
        if self._weights is None:
            generator = torch.Generator(device="cpu").manual_seed(2)
            drawn = torch.randn(self.outputs, _OUTPUTS, generator=generator, dtype=torch.float64, device="cpu")
            self._weights = (drawn / math.sqrt(self.outputs)).to(values)
        return values @ self._weights
