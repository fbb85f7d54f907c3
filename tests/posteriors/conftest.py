"""Shared by the tests of checkpoints."""

import pytest

from nullbayes.posteriors import checkpoint


@pytest.fixture
def at_every_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", float("inf"))
