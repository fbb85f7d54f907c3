"""A package that is installed is imported: the tests of its integration run, and are not skipped for another reason."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

import pytest


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")  # of the packages, about themselves
@pytest.mark.parametrize("name", ["sklearn", "lightning.pytorch", "transformers", "torchmetrics", "onnxscript"])
def test_an_installed_package_can_be_imported(name: str) -> None:
    distribution = {"sklearn": "scikit-learn"}.get(name, name.partition(".")[0])
    try:
        version(distribution)
    except PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    importlib.import_module(name)
