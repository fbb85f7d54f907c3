"""Posterior files: tensors in safetensors, and a JSON header in their metadata. Nothing is ever unpickled.

The metadata have one entry of two lines: the header, and the SHA-256 digest of the header and the tensors. A file that
was altered anywhere is refused. (With two entries, safetensors would write them in a random order, and equal posteriors
would make different files.)
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

FORMAT_VERSION = 8
_KEY = "nullbayes"


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, what: str = "posterior"
) -> None:
    """Write a file atomically: the new file is written beside the old one and then renamed.

    The old file stays intact until the new one is on the disk, whatever happens meanwhile. A symbolic link is kept, and
    the file that it points to is replaced.
    """
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        text = json.dumps({"format_version": FORMAT_VERSION, **header}, allow_nan=False)
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():  # whose error would name a file of ours
            msg = f"there is no folder {target.parent}"
            raise FileNotFoundError(msg)
        if target.exists() and not target.is_file():  # a rename would replace a device as well
            raise OSError(errno.EEXIST, "the path exists and is not a file")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_prefix(target)) as folder:
            temporary = Path(folder) / "whole"
            save_file(contents, temporary, metadata=_metadata(text, contents))
            (plain := Path(folder) / "plain").touch()
            shutil.copymode(plain, temporary)  # safetensors gives permissions to the owner only
            _to_disk(temporary)
            os.replace(temporary, target)
        with contextlib.suppress(OSError):  # the new name as well, where the system supports it
            _to_disk(target.parent)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        msg = f"The {what} could not be written to {os.fspath(path)}: {error}. Choose another place, or make room."
        raise FileError(msg) from error


def remove(path: Path, *, only_strays: bool = False) -> None:
    """Remove a file, and the temporary folders that processes killed while writing it have left behind."""
    stray = re.compile(rf"{re.escape(_prefix(path))}\w{{8}}")
    for folder in path.parent.iterdir():
        if stray.fullmatch(folder.name) and folder.is_dir():
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
            # safetensors opens a file more than once: the file was replaced in between, so read it again


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(source: Path, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata[_KEY].partition("\n")[0]
            header: dict[str, Any] = json.loads(text)
            _check_version(source, header["format_version"])
            # cloned, because tensors that are mapped to the file would change with it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        if metadata != _metadata(text, tensors):
            msg = "the checksum does not match"
            raise ValueError(msg)
    except FileError:
        raise
    except Exception as error:  # parsers of arbitrary bytes may raise anything
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


def _metadata(text: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the header's text with the digest of that text and of the tensors."""
    return {_KEY: f"{text}\n{fingerprint(sorted(tensors.items()), text)}"}


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder is on the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
