"""Posterior files: tensors in safetensors, everything else in a JSON header. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nullbayes.errors import FileError

FORMAT_VERSION = 1
_KEY = "nullbayes"


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, what: str = "posterior"
) -> None:
    """Write a file whole or not at all: beside its place first, then renamed into it."""
    target = Path(path)
    metadata = {_KEY: json.dumps({"format_version": FORMAT_VERSION, **header})}
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            temporary = Path(folder) / "whole"
            save_file(contents, temporary, metadata=metadata)
            (plain := Path(folder) / "plain").touch()
            shutil.copymode(plain, temporary)  # safetensors writes for the owner alone
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())  # a machine that stops must not leave the name without the contents
            os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        msg = f"The {what} could not be written to {target}: {error}."
        raise FileError(msg) from error


def remove(path: Path, *, only_strays: bool = False) -> None:
    """Remove a file, and what processes that were killed while they wrote it have left beside its place."""
    left = re.compile(rf"\.{re.escape(path.name)}\.\w{{8}}")
    for folder in path.parent.iterdir():
        if left.fullmatch(folder.name) and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    if not only_strays:
        path.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], *, what: str = "posterior") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a file, or say what is wrong with it."""
    source = Path(path)
    if not source.is_file():
        msg = f"There is no {what} file {source}."
        raise FileError(msg)
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata[_KEY])
            if not isinstance(header, dict):
                raise TypeError
            version = header.get("format_version")
            if not isinstance(version, int) or version > FORMAT_VERSION:
                msg = (
                    f"{source} has format version {version}; this nullbayes reads up to {FORMAT_VERSION}: "
                    "upgrade nullbayes."
                )
                raise FileError(msg)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, FileError):
            raise
        msg = f"{source} is not a {what} file, or it is truncated or altered ({type(error).__name__}: {error})."
        raise FileError(msg) from error
    return tensors, header


def check_model(
    header: Mapping[str, Any], names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], fingerprint: str
) -> None:
    """Refuse a file that was made for another model."""
    wanted = [(name, tuple(shape)) for name, shape in header["parameters"]]
    here = list(zip(names, shapes, strict=True))
    if wanted != here:
        odd = next(
            (f"{a[0]} {a[1]}" for a in wanted if a not in here),
            f"{len(wanted)} parameters instead of {len(here)}",
        )
        msg = f"The file belongs to a model of another structure: it has {odd}, which this model has not."
        raise FileError(msg)
    if header["fingerprint"] != fingerprint:
        msg = (
            "The file belongs to a model of the same structure with other parameters: "
            "load the state_dict that the posterior was fitted to."
        )
        raise FileError(msg)
