"""A posterior file to damage."""

from pathlib import Path

import pytest

from support.posterior_fits import fit_mlp


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a file of the small network holds."""
    path = tmp_path_factory.mktemp("good") / "posterior.safetensors"
    fit_mlp().save(path)
    return path.read_bytes()


@pytest.fixture
def saved(good: bytes, tmp_path: Path) -> Path:
    """A posterior file of the small network."""
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(good)
    return path
