"""One thread for NumPy, too: these matrices are so small that sharing them out costs more than computing."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    try:
        from threadpoolctl import threadpool_limits  # comes with scikit-learn
    except ImportError:
        yield
        return
    with threadpool_limits(1):
        yield
