r"""The relative variance, :math:`\operatorname{tr} J P J^\top / \operatorname{tr} J J^\top`: how new a direction is.

The variance of a projected posterior is large for two reasons: because the Jacobian of an input is large, and because
its direction is new. The relative variance divides the size out. It needs neither precision nor temperature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.products import linearized
from nullbayes.posteriors.arguments import normal
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Masks, pooled, stream

RELATIVE = "relative_variance"


@full_precision()
def relative_variance(self: Any, x: Any, per: str, mask: Mask) -> Tensor:  # (N,) or (N, ...) in [0, 1]
    """Return the variance of the projected noise over that of the same noise before its projection."""
    if self._base is not None:
        msg = f'"{RELATIVE}" is known for noise N(0, I) only, not for a base distribution: use "max_variance".'
        raise SettingsError(msg)
    network, likelihood, n = self._network, self._likelihood, self.n_samples
    network.check_unchanged()
    noise = normal(network, self._need_measured().seed, 0, n).to(self.directions)
    both = torch.cat([self.directions, noise])
    parts, masks = [], Masks(likelihood, mask)
    for piece in stream(x, network, self._batch_fn, len(both)):
        outputs, changes = linearized(network, piece, both)
        masks.look(piece, outputs)
        units = likelihood.noise_variance(outputs)
        squares = changes.square() if units is None else changes.square() / units
        after, before = (likelihood.at_positions(part.mean(0), largest=False) for part in (squares[:n], squares[n:]))
        parts.append((after / before.clamp_min(torch.finfo(before.dtype).tiny)).clamp_max(1.0))
    found = torch.cat(parts)
    whole = masks.joined(outputs.new_zeros(len(found), *outputs.shape[1:]))
    return pooled(found, whole, per)
