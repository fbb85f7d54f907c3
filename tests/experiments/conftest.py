"""Shared by the tests of studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nullbayes.experiments.frame import Settings, Store
from support.data_folders import write_blobs


@pytest.fixture(scope="module")
def blobs(ordinary_default: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of blobs in place of MNIST and of its strangers."""
    return write_blobs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def settings(data: Path, folder: Path) -> Settings:
    """Those of a run in a folder, for a module that says where its data are and where it ran."""
    return Settings(data=data, store=Store(folder, say=lambda line: None), seeds=1)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What a run in a folder has written."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["results"]
    return found
