"""Numbers as people have them: Python's own, NumPy's, or tensors without dimensions."""

from __future__ import annotations

import math
import operator
import reprlib
from typing import Any

from nullbayes.errors import SettingsError


def whole(value: Any, name: str = "n_samples") -> int:
    """Return a whole number, or say that it is none."""
    try:
        return operator.index(value)
    except TypeError:
        msg = f"{name} must be a whole number, not {reprlib.repr(value)[:60]}."
        raise SettingsError(msg) from None


def positive(value: Any) -> float | None:
    """Return a positive finite number; None for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if 0 < number < math.inf else None
