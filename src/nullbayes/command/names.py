"""What users name: ``package.module:name`` or ``file.py:name``, found in the current folder or where Python looks."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from nullbayes.command.frame import Refusal, misused

_FORM = "package.module:name or file.py:name"
_TYPED = (  # how messages of the library name what is passed in Python, and what is typed instead
    (r"""likelihood=["'](\w+)["'] or "(\w+)\"""", r"--likelihood \1 or \2"),
    (r"""likelihood=["'](\w+)["']""", r"--likelihood \1"),
    (r"load\(\.\.\., likelihood=\w+\)", "--likelihood own:loss"),
    (r"or (output|batch)_fn=lambda", r"or --\1-fn with the name of a function such as lambda"),
    (r"\b(output|batch)_fn=lambda", r"--\1-fn and the name of a function such as lambda"),
    (r"load the state_dict that", "pass with --weights the weights that"),
    (r"Are the trained weights loaded, model\.load_\S+\?", "Is --weights the file of the trained weights?"),
    (r"memory_limit='([^']*)'", r"--memory-limit \1"),
    (r"memory_limit\b", "--memory-limit"),
    (r"parameters='([^']*)'", r"--parameters '\1'"),
    (r"\bin_data\b", "--data"),
    (r"call (posterior\.)?calibrate\([^()]*\) first", "fit with --held-out first"),
    (r" for it, name: \(method, score\)", ""),
)


def named(text: str, option: str) -> Any:
    """Return what a user's name stands for, as the module holds it: nothing is called.

    Names such as "project.data:train" may be dotted, "project.data:Digits.train". ``option`` is the one that the name
    was passed to, for messages.
    """
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        msg = f"{option} {text}: write it as {_FORM}."
        raise misused(msg)
    module = _from_file(Path(place), option) if place.endswith(".py") else _from_module(place, option)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            there = [known for known in vars(module) if not known.startswith("_")]
            there.sort(key=lambda known: -difflib.SequenceMatcher(None, known, part).ratio())  # the likeliest first
            has = f"it has {', '.join(there[:8])}{', …' if len(there) > 8 else ''}" if there else "it is empty"
            msg = f"{option} {text}: {place} has no {name!r}; {has}."
            raise misused(msg)
        found = getattr(found, part)
    return found


def _from_file(path: Path, option: str) -> ModuleType:
    """Import a file by its path; its neighbours can be imported by it."""
    if not path.is_file():
        msg = f"{option}: there is no file {path}."
        raise misused(msg)
    known = sys.modules.get(path.stem)
    if known is not None and _file_of(known) == path.resolve():
        return known
    name = path.stem if known is None else f"_file_{path.stem}"
    _look_in(path.resolve().parent)
    return _load(importlib.util.spec_from_file_location(name, path.resolve()), name, option)


def _from_module(place: str, option: str) -> ModuleType:
    """Import a module by its name, from the current folder if it is there.

    Of the current folder nothing but the named module comes before what is installed, so that a file in it that
    happens to be called as a package of Python is not imported instead.
    """
    here, top = Path.cwd(), place.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [str(here)])
    _look_in(here)
    if spec is not None and spec.origin is not None:
        known = sys.modules.get(top)
        if known is None:
            _load(spec, top, option)
        elif _file_of(known) != Path(spec.origin).resolve():
            msg = (
                f"{option}: {top} in this folder is hidden by a module of that name: write {top}.py:name, or rename it."
            )
            raise misused(msg)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            msg = f"{option}: there is no module {place!r}, neither in this folder nor among what is installed."
            raise misused(msg) from error
        raise _failed(place, option, error) from error
    except Exception as error:
        raise _failed(place, option, error) from error


def _load(spec: importlib.machinery.ModuleSpec | None, name: str, option: str) -> ModuleType:
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: what it defines may look for its module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _failed(str(spec.origin), option, error) from error
    return module


def _failed(place: str, option: str, error: Exception) -> Refusal:
    return Refusal(f"{option}: {place} cannot be imported, {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split()) or "no message"


def typed(text: str) -> str:
    """Return a message of the library in the words of the command line."""
    for pattern, replacement in _TYPED:
        text = re.sub(pattern, replacement, text)
    return text


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


def _look_in(folder: Path) -> None:
    """Let modules of a folder be imported, behind all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
