"""The two ways to call ``fit``: with a loader, or with inputs and targets."""

from __future__ import annotations

from typing import Any

from nullbayes.errors import DataError
from nullbayes.jacobian.batches import is_array
from nullbayes.posteriors.numbers import whole


def data_and_count(loader: Any, targets: Any, n_samples: Any) -> tuple[Any, int]:
    """Return the data and the number of samples of ``fit(loader, n)``, ``fit(x, y)`` or ``fit(x, y, n)``."""
    if targets is None:
        return loader, whole(n_samples)
    if is_array(targets):
        return (loader, targets), whole(n_samples)
    if isinstance(targets, (list, tuple)):
        msg = f"Targets must be a tensor or an array, not a {type(targets).__name__}: torch.as_tensor makes one of it."
        raise DataError(msg)
    return loader, whole(targets)
