"""Names for the functions that are passed around."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from torch import Tensor


class RowFunction(Protocol):
    """What the rows are the derivatives of: one output of the network, or its loss, for each row."""

    def __call__(self, flat: Tensor, x: Any, y: Tensor) -> Tensor:  # (P,) -> (n, O)
        """Evaluate at flat parameters on some examples."""


Storage = Literal["device", "half", "host", "recompute", "matrix_free"]
"""Where rows are: held on the device, there in half precision, or on the host; formed again in passing; matrix-free."""
