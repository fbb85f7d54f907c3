"""Shared by all tests."""

import pytest
import torch

torch.set_num_threads(1)  # the matrices are tiny: threads that wait for each other take longer than the work


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What is drawn without a generator is the same in every run, whichever tests ran before."""
    torch.manual_seed(0)
