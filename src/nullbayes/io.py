"""Posterior files: tensors in safetensors, everything else in a JSON header. Nothing is ever unpickled.

The header ends in a hash of itself and of the tensors: a file in which anything was altered is refused.
"""

from __future__ import annotations

import contextlib
import errno
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
from nullbayes.hashing import fingerprint

FORMAT_VERSION = 4
_KEY = "nullbayes"
_SEAL = ', "sha256": "'


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, what: str = "posterior"
) -> None:
    """Write a file whole or not at all: beside its place first, then renamed into it.

    What was there before stays as it was until the new file is on the disk, whatever happens meanwhile. Where the path
    is a symbolic link, the link stays and the file that it points to is replaced.
    """
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        text = json.dumps({"format_version": FORMAT_VERSION, **header}, allow_nan=False)
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # renaming would put a file in the place of a device, too
            raise OSError(errno.EEXIST, "there is something else than a file")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_prefix(target)) as folder:
            temporary = Path(folder) / "whole"
            save_file(contents, temporary, metadata={_KEY: _sealed(text, contents)})
            (plain := Path(folder) / "plain").touch()
            shutil.copymode(plain, temporary)  # safetensors writes for the owner alone
            _to_disk(temporary)
            os.replace(temporary, target)
        with contextlib.suppress(OSError):  # the name, too, where the system can do that
            _to_disk(target.parent)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        msg = f"The {what} could not be written to {os.fspath(path)}: {error}. Choose another place, or make room."
        raise FileError(msg) from error


def remove(path: Path, *, only_strays: bool = False) -> None:
    """Remove a file, and what processes that were killed while they wrote it have left beside its place."""
    left = re.compile(rf"{re.escape(_prefix(path))}\w{{8}}")
    for folder in path.parent.iterdir():
        if left.fullmatch(folder.name) and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    if not only_strays:
        path.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name[:200]}."


def read(path: str | os.PathLike[str], *, what: str = "posterior") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a file, or say what is wrong with it."""
    source = Path(path)
    while True:
        if not source.is_file():
            msg = f"There is no {what} file {source}."
            raise FileError(msg)
        state = _state(source)
        try:
            return _read(source, what)
        except FileError:
            if _state(source) == state:
                raise
            # else it was replaced meanwhile, and half of each was read: safetensors opens a file more than once


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(source: Path, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(source, framework="pt") as file:
            sealed = (file.metadata() or {})[_KEY]
            header = json.loads(sealed)
            _check_version(source, header["format_version"])
            # cloned: they would go on to lie in the file, and change with it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        if sealed != _sealed(sealed.rpartition(_SEAL)[0] + "}", tensors):
            msg = "its checksum is another"
            raise ValueError(msg)
        del header["sha256"]
    except FileError:
        raise
    except Exception as error:  # whatever a parser makes of bytes that may be anything
        msg = (
            f"{source} is not a {what} file, or it is truncated or altered ({type(error).__name__}: {error}): "
            "take another copy of it, or fit and save again."
        )
        raise FileError(msg) from error
    return tensors, header


def _check_version(source: Path, version: Any) -> None:
    if type(version) is int and version == FORMAT_VERSION:
        return
    old = type(version) is int and version < FORMAT_VERSION
    advice = "fit and save again" if old else "upgrade nullbayes"
    msg = f"{source} has format version {str(version)[:20]}; this nullbayes reads {FORMAT_VERSION}: {advice}."
    raise FileError(msg)


def _sealed(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a JSON object with a hash of its own text and of the tensors as its last entry."""
    return f'{text[:-1]}{_SEAL}{fingerprint(sorted(tensors.items()), text)}"}}'


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder is on the disk: after a power cut there is the old one or the new one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_model(
    header: Mapping[str, Any], names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], model: str
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
    if header["fingerprint"] != model:
        msg = (
            "The file belongs to a model of the same structure with other parameters: "
            "load the state_dict that the posterior was fitted to."
        )
        raise FileError(msg)
