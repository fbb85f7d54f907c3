"""Checkpoints: what a fit has reached, in a file, so that another process can go on from there, bit by bit the same.

The file holds the state of the projector's iteration, the seed, and what tells the problem: hashes of the model and of
the data, and every setting that the result depends on. It is taken up by the same fit alone.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from nullbayes import io
from nullbayes.errors import FileError, NullBayesWarning, SettingsError
from nullbayes.hashing import fingerprint, raw
from nullbayes.posteriors.noise import draw_seed
from nullbayes.posteriors.setup import Asked, Setup, set_up
from nullbayes.projectors import Iterative

KIND = "checkpoint"
_EVERY = 5.0  # seconds between two writings, at least
_SHARE = 0.02  # of the time may go into writing
_HASHED = ("model", "data", "noise")  # what a sentence cannot show


class Checkpoint:
    """The file of a fit for the time of a ``with`` block, or none; a ``Store`` of the projector's iteration.

    The file stays when the fit is killed, interrupted, or fails after its first sweep; it is removed when the fit has
    finished. What could not be written the first time, before any work, is an error; later it is a warning.

    Parameters
    ----------
    path : path, optional
        Where; None stores nothing.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._header: dict[str, Any] = {}
        self._ours = self._written = self._swept = self._interrupted = False
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        finished = kind is None and not self._interrupted
        in_vain = kind is not None and issubclass(kind, Exception) and not self._swept
        if self._path is not None and self._ours and (finished or in_vain):
            io.remove(self._path)

    def begin(self, asked: Asked, seed: int | None, noise: Callable[[int], Tensor] | None) -> tuple[int, Setup]:
        """Return the seed and the plan of the fit, the file's own if there is one; refuse the file of another fit.

        Parameters
        ----------
        asked : Asked
            What was asked of the fit.
        seed : int, optional
            Where a generator was given.
        noise : callable, optional
            The noise that follows from a seed, where it is not N(0, I).
        """
        if self._path is None:
            return draw_seed(None) if seed is None else seed, set_up(asked)
        problem, stored = _problem(asked), self._read() if self._path.is_file() else None
        if stored is None:
            seed, setup = draw_seed(None) if seed is None else seed, set_up(asked)
        else:
            header = stored[1]
            self._compare(problem, header["problem"])
            if seed is not None and seed != header["seed"]:
                self._refuse("its generator had another seed (none need be passed)")
            try:
                seed, setup = header["seed"], set_up(asked, **header["memory"])
            except SettingsError:
                self._refuse("its memory is too small for it")
        assert seed is not None
        problem["plan"] = str(setup)
        problem["noise"] = "N(0, I)" if noise is None else hashlib.sha256(raw(noise(seed))).hexdigest()
        self._header = {"kind": KIND, "problem": problem, "seed": seed, "memory": _memory(setup)}
        if stored is not None:
            self._compare(problem, header["problem"])
            self._ours, self._swept = True, bool(stored[0])
        elif isinstance(setup.projector, Iterative):
            self._write({})
            self._ours = True
        if self._ours:
            io.remove(self._path, only_strays=True)
        self._next = time.monotonic() + _EVERY
        return seed, setup

    def follow(self, setup: Setup) -> None:
        """Begin the file anew where the plan has changed; the one before may have had nothing to store."""
        if self._path is None or str(setup) == self._header["problem"]["plan"]:
            return
        self._header["problem"]["plan"], self._header["memory"] = str(setup), _memory(setup)
        if isinstance(setup.projector, Iterative):
            self._write({})
            self._ours, self._swept = True, False

    def load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state in the file, or the one given where there is none yet."""
        if not self._swept:
            return state
        stored = self._read()[0]
        if {name: _form(tensor) for name, tensor in stored.items()} != {name: _form(t) for name, t in state.items()}:
            self._refuse("its tensors have other names, shapes or dtypes")
        rows, here = stored["reference"].to(state["reference"]), state["reference"]
        if rows.shape != here.shape or not torch.allclose(rows, here, rtol=1e-3, atol=0.0):
            self._refuse("its rows or its noise are other numbers")
        # copies: how memory is aligned changes the last bits of products
        return {name: tensor.to(state[name].device, copy=True) for name, tensor in stored.items()}

    def save(self, state: Mapping[str, Tensor], *, interrupted: bool = False) -> None:
        """Write the state, if it is time; that of an interruption in any case."""
        start = time.monotonic()
        if self._path is None or not (interrupted or start >= self._next):
            return
        self._interrupted = interrupted
        self._write(state)
        self._swept = True
        spent = time.monotonic() - start
        self._next = start + spent + max(_EVERY, spent / _SHARE)

    def _write(self, state: Mapping[str, Tensor]) -> None:
        assert self._path is not None
        contents = {name: tensor.detach().cpu() for name, tensor in state.items()}
        header = {**self._header, "digest": fingerprint(sorted(contents.items()))}
        try:
            io.save(self._path, contents, header, what="checkpoint")
        except FileError as error:
            if not self._written:
                raise
            message = f"{error} The fit goes on without: if it is killed, it can be resumed where the file left it."
            warnings.warn(message, NullBayesWarning, stacklevel=2)
        else:
            self._written = True

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the header of the file, if it is a checkpoint as it was written."""
        assert self._path is not None
        advice = "delete it, or pass another path as checkpoint."
        try:
            tensors, header = io.read(self._path, what="checkpoint")
        except FileError as error:
            msg = f"{error} To fit anew, {advice}"
            raise FileError(msg) from error
        if header.get("kind") != KIND:
            msg = f"{self._path} holds a posterior, not a checkpoint: pass another path as checkpoint."
            raise FileError(msg)
        if not _is_whole(header) or header["digest"] != fingerprint(sorted(tensors.items())):
            msg = f"The checkpoint {self._path} was altered since it was written: {advice}"
            raise FileError(msg)
        return tensors, header

    def _compare(self, here: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        names = [name for name in here if here[name] != stored.get(name)]
        shown = [
            f"another {name}" if name in _HASHED else f"{name} was {stored.get(name)!r} and is {here[name]!r}"
            for name in names
        ]
        if shown:
            self._refuse("; ".join(shown))

    def _refuse(self, why: str) -> NoReturn:
        msg = (
            f"The checkpoint {self._path} belongs to another fit: {why}. Call fit as it was called then, delete the "
            "file, or pass another path as checkpoint."
        )
        raise FileError(msg)


def _memory(setup: Setup) -> dict[str, int]:
    """Return what a plan was made from, to make it again."""
    return {"limit": setup.limit, "host": setup.host, "halvings": len(setup.notes)}


def _is_whole(header: Mapping[str, Any]) -> bool:
    """Say whether a header has what a fit goes on from, as a fit could have written it."""
    memory = header.get("memory")
    if not (isinstance(header.get("problem"), dict) and "digest" in header and isinstance(memory, dict)):
        return False
    if memory.keys() != {"limit", "host", "halvings"} or any(type(n) is not int or n < 0 for n in memory.values()):
        return False
    return type(header.get("seed")) is int


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return what of a tensor stays the same while samples are let go."""
    return tensor.dtype, tuple(tensor.shape[1:])


def _problem(asked: Asked) -> dict[str, Any]:
    """Return what tells the problem, the noise apart: all that the directions depend on."""
    rows, network = asked.rows, asked.rows.network
    likelihood = (rows.likelihood.name, getattr(rows.likelihood, "sigma_noise", None))
    return {
        "n_samples": asked.n_samples, "tolerance": asked.tolerance, "projector": str(asked.projector),
        "memory_limit": asked.memory_limit, "rows": type(rows).__name__, "hessian": getattr(rows, "hessian", False),
        "likelihood": list(likelihood), "parameters": list(network.names), "device": rows.device.type,
        "model": network.fingerprint(), "data": rows.examples.fingerprint(),
    }  # fmt: skip
