"""Other chunk sizes for the time of a test."""

from dataclasses import replace

import pytest

from nullbayes.limits import LIMITS


def limited(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Replace entries of the table of limits, on every kind of device."""
    for kind, limits in LIMITS.items():
        monkeypatch.setitem(LIMITS, kind, replace(limits, **sizes))
