"""One thread, since these matrices are so small; and torch's own deprecation warning, out of the way."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_limits  # comes with scikit-learn


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


@pytest.fixture(autouse=True, scope="package")
def forward_mode() -> None:
    """Torch 2.13 warns of its own `torch.jit.script` when forward-mode differentiation is first used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
