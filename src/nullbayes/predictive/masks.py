"""Which positions of an input count: padding does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nullbayes.errors import DataError
from nullbayes.jacobian.batches import as_tensors, is_array
from nullbayes.likelihoods import Likelihood

Mask = None | str | Tensor | np.ndarray | Callable[[Any], Any]


class Masks:
    """The masks of the batches of a prediction.

    Parameters
    ----------
    likelihood : Likelihood
        Says which dimensions of the outputs are positions.
    mask : Tensor or array (N, ...), callable (inputs) -> Tensor, "all", or None
        True where a position counts. None takes an input's own ``attention_mask`` where its shape is that of the
        positions; "all" counts every position.
    """

    def __init__(self, likelihood: Likelihood, mask: Mask) -> None:
        mask = as_tensors(mask, None) if is_array(mask) else mask
        if not (
            mask is None or isinstance(mask, Tensor) or callable(mask) or (isinstance(mask, str) and mask == "all")
        ):
            what = repr(mask) if isinstance(mask, str) else f"a {type(mask).__name__}"
            msg = f'mask must be a tensor or an array, a function of the inputs, "all" or None, not {what}.'
            raise DataError(msg)
        self._likelihood, self._mask = likelihood, mask
        self._found = list[Tensor | None]()

    def look(self, inputs: Any, outputs: Tensor) -> None:
        """Take note of the mask of a batch."""
        found, shape = None, self._likelihood.positions(outputs)
        if callable(self._mask):
            given = self._mask(inputs)
            found = _fitted(as_tensors(given, None) if is_array(given) else given, shape).to(outputs.device)
        elif self._mask is None and isinstance(inputs, Mapping):
            own = inputs.get("attention_mask")
            if isinstance(own, Tensor) and 1 < own.ndim <= len(shape) and tuple(own.shape) == shape[: own.ndim]:
                found = _fitted(own, shape)
        self._found.append(found)

    def joined(self, outputs: Tensor) -> Tensor | None:  # (N, ...) -> bool (N, ...)
        """Return the mask of all inputs, in the shape of their positions; None where everything counts."""
        if isinstance(self._mask, Tensor):
            return _fitted(self._mask.to(outputs.device), self._likelihood.positions(outputs))
        masks = [mask for mask in self._found if mask is not None]
        return torch.cat(masks) if masks and len(masks) == len(self._found) else None


def _fitted(mask: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a mask in the shape of the positions: dimensions that it does not have count or do not as a whole."""
    given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if len(shape) == 1:
        msg = "A mask says which positions count, but each input has one answer here: leave mask out."
        raise DataError(msg)
    if not isinstance(mask, Tensor) or mask.ndim < 2 or given != shape[: mask.ndim]:
        msg = f"The mask must be a tensor of the shape of the positions, {shape}, not {given}."
        raise DataError(msg)
    return mask.bool().reshape(*mask.shape, *(1 for _ in shape[mask.ndim :])).expand(shape)
