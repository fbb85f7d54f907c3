"""A user's folder: a module ``own`` with a model and data, and the examples of the command's help, which use it."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nullbayes.command import COMMANDS

OWN = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def some(n, seed):
    """Three clusters in four dimensions."""
    y = torch.arange(n, device="cpu") % 3
    noise = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), device="cpu")
    return 2.0 * torch.eye(4, device="cpu")[y] + 0.7 * noise, y

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

def train():
    return DataLoader(TensorDataset(*some(48, 0)), batch_size=20)

def held_out():
    return some(240, 1)

def test():
    return some(60, 2)

def noise():
    return 4.0 * torch.randn(50, 4, generator=torch.Generator().manual_seed(3), device="cpu")
'''


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Work in a folder, and forget afterwards what was imported from it."""
    path, modules = list(sys.path), set(sys.modules)
    with contextlib.chdir(folder):
        yield folder
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def example(name: str) -> list[str]:
    """The words of the example in a command's help."""
    (text,) = (command.example for command in COMMANDS if command.name == name)
    words = shlex.split(text)
    assert words[0] == "nullbayes"
    return words[1:]


def imported(path: Path) -> Any:
    """A file as a module of its own, imported without the command."""
    spec = importlib.util.spec_from_file_location(f"copy_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
