"""The shape of the library stays simple: short modules, few imports, shallow inheritance, few files per fit."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import nullbayes as nb
from support.source_files import PACKAGE, each_module

MAX_IMPORTS, MAX_CLASSES, MAX_FILES, MAX_LINES = 12, 4, 40, {"posteriors": 250}


def imported_modules(path: Path) -> set[str]:
    """The modules of ours that a module imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "nullbayes"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nullbayes":
            for alias in node.names:  # a module of a package, or a name of a module
                inside = PACKAGE.joinpath(*f"{node.module}.{alias.name}".split(".")[1:])
                is_module = inside.with_suffix(".py").is_file() or inside.is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else str(node.module))
    return found


def classes() -> Iterator[type]:
    """All classes that the library defines."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "nullbayes."):
        if not module.name.endswith("__main__"):
            for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if kind.__module__ == module.name:
                    yield kind


@each_module
def test_module_imports_few_modules_of_ours(path: Path) -> None:
    if path.name == "__init__.py":
        return  # an index of names
    n_imports = len(found := imported_modules(path))
    assert n_imports <= MAX_IMPORTS, sorted(found)


@each_module
def test_module_of_posteriors_is_short(path: Path) -> None:
    n_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert n_lines <= MAX_LINES.get(path.parent.name, n_lines)


def test_inheritance_is_shallow() -> None:
    deep = {}
    for kind in classes():
        ours = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("nullbayes")]
        if len(ours) > MAX_CLASSES and not issubclass(kind, BaseException):
            deep[kind.__name__] = ours
    assert not deep


@each_module
def test_super_is_called_in_constructors_only(path: Path) -> None:
    constructors = ("__init__", "__post_init__", "__init_subclass__", "__new__")
    inside = [
        f"{function.name}, line {node.lineno}"
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name not in constructors
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    ]
    assert not inside


@each_module
def test_no_attribute_is_taken_out_of_a_dictionary_of_an_object(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "vars(self).pop" not in text
    assert "self.__dict__.pop" not in text


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_a_small_fit_enters_few_files(kind: type) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(20, 4)
    y = model(x).argmax(1)  # a network that knew nothing would cause a warning
    kind(model).fit([(x, y)], 2, progress=False)  # late imports are done
    posterior, entered = kind(model), set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        entered.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        posterior.fit([(x, y)], progress=False)
    finally:
        sys.settrace(before)
    ours = sorted(str(Path(name).relative_to(PACKAGE)) for name in entered if name.startswith(str(PACKAGE)))
    n_files = len(ours)
    assert n_files <= MAX_FILES, ours
