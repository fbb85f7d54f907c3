"""Shared by the tests of benchmarks."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _told_their_device(ordinary_default: None) -> None:
    """Benchmarks do not ask where tensors lie by default."""
