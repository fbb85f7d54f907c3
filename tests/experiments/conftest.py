"""Shared by the tests of studies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.data_folders import write_blobs


@pytest.fixture(scope="module")
def ordinary_default() -> Iterator[None]:
    """Experiments are told their device; where tensors lie by default is another matter."""
    before = torch.get_default_device()
    if before.type == "cpu":
        yield  # a default that is set costs time at every call of torch
        return
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)


@pytest.fixture(scope="module")
def blobs(ordinary_default: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of blobs in place of MNIST and of its strangers."""
    return write_blobs(tmp_path_factory.mktemp("data"))
