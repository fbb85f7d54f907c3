"""Shared by the tests of all methods."""

import pytest

from nullbayes import baselines


@pytest.fixture(autouse=True)
def _needs_curvlinops(request: pytest.FixtureRequest) -> None:
    """Leave out what an optional dependency gives, where that is missing."""
    if "method" in request.fixturenames and request.getfixturevalue("method").kind is baselines.KroneckerLaplace:
        pytest.importorskip("curvlinops")
