"""A user's folder, with weights and a posterior that the command has fitted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nullbayes.command import main
from support.user_folder import OWN, example, imported, inside


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, with ``posterior.safetensors`` from the example of ``nullbayes fit``."""
    folder = tmp_path_factory.mktemp("story")
    (folder / "own.py").write_text(OWN)
    own = imported(folder / "own.py")
    x, y = own.some(48, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = own.build().cpu()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for _ in range(100):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with inside(folder):
        torch.save(model.state_dict(), "own.pt")
        assert main(example("fit")) == 0
    return folder


@pytest.fixture
def own(story: Path) -> Iterator[Any]:
    """The user's module and trained model, with the user's folder as the current one."""
    with inside(story):
        found = imported(story / "own.py")
        found.model = found.build().cpu()
        found.model.load_state_dict(torch.load(story / "own.pt"))
        found.model.eval()
        yield found
