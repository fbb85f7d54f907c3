"""Checkpoints: the state of a fit in a file, from which another process can continue to the same result, bit by bit.

The file holds the state of the projector's iteration, the seed, and the identity of the fit: hashes of the model and of
the data, and every setting that the result depends on. No other fit can continue from it. Another number of processes
that share the data can: they make a plan of their own, and continue from the samples as they are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from nullbayes import io
from nullbayes.distributed import ALONE, Group
from nullbayes.errors import FileError, warn
from nullbayes.hashing import fingerprint
from nullbayes.posteriors.header import Count, check_fields, fields_of
from nullbayes.posteriors.plan import FitPlan, FitRequest, described
from nullbayes.projectors import Iterative

KIND = "checkpoint"
_EVERY = 5.0  # seconds between two writings, at least
_SHARE = 0.02  # of the time may be spent on writing
_HASHED = ("model", "data", "noise")  # settings that a message cannot show
_DIVIDED = ("processes", "plan")  # what depends on how many processes share the data


@dataclass(frozen=True)
class Memory:
    """The memory for which the stored plan was made, to make it again: see :func:`make_plan`."""

    limit: Count
    host: Count
    halvings: Count


@dataclass(frozen=True)
class Header:
    """The header of the file: the identity of the fit, its seed, and the memory of its plan."""

    format_version: Count
    kind: str
    problem: dict[str, Any]
    seed: Count
    memory: Memory


class Checkpoint:
    """The file of a fit, for the time of a ``with`` block; a ``Store`` of the projector's iteration.

    The file stays when the fit is killed, interrupted, or fails after its first sweep. It is removed when the fit has
    finished. If the first writing fails, before any work, that is an error; later it is a warning. Of the processes of
    a ``group``, the first reads and writes the file.
    """

    def __init__(self, path: str | os.PathLike[str], group: Group = ALONE) -> None:
        self._path, self._group = Path(path), group
        self._header: dict[str, Any] = {}
        self._ours = self._written = self._swept = self._interrupted = False
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        finished = kind is None and not self._interrupted
        in_vain = kind is not None and issubclass(kind, Exception) and not self._swept
        if self._ours and (finished or in_vain):
            io.remove(self._path)

    def stored(self, request: FitRequest, seed: int | None) -> tuple[int, Memory | None] | None:
        """Return the seed and the memory of the fit in the file, or None without a file; refuse that of another fit.

        ``seed`` is that of the generator that the user passed, if any. The memory is None if another number of
        processes shared the data.
        """
        return self._group.first(lambda: self._stored(request, seed))

    def _stored(self, request: FitRequest, seed: int | None) -> tuple[int, Memory | None] | None:
        if not self._path.is_file():
            return None
        _, header = self._read()
        here, stored = _identity(request), header["problem"]
        self._compare(here, stored)
        if seed is not None and seed != header["seed"]:
            self.refuse("its generator had another seed (none need be passed)")
        same = here["processes"] == stored.get("processes")
        return header["seed"], Memory(**header["memory"]) if same else None

    def begin(self, request: FitRequest, plan: FitPlan, seed: int, noise: Tensor | None) -> None:
        """Resume the file, if there is one, or write the first; ``noise`` is what is projected if not N(0, I)."""
        problem = _identity(request)
        problem["plan"] = list(plan.key)
        problem["noise"] = "N(0, I)" if noise is None else fingerprint([("noise", noise)])
        self._header = {"kind": KIND, "problem": problem, "seed": seed, "memory": _memory(plan)}
        if self._group.rank:
            return
        if self._path.is_file():
            tensors, header = self._read()
            self._compare(problem, header["problem"])
            self._ours, self._swept = True, bool(tensors)
        elif isinstance(plan.projector, Iterative):
            self._write({})
            self._ours = True
        if self._ours:
            io.remove(self._path, only_strays=True)
        self._next = time.monotonic() + _EVERY

    def follow(self, plan: FitPlan) -> None:
        """Begin the file anew if the plan has changed; the plan before it may have had nothing to store."""
        if self._header["problem"]["plan"] == list(plan.key):
            return
        self._header["problem"]["plan"], self._header["memory"] = list(plan.key), _memory(plan)
        if isinstance(plan.projector, Iterative) and self._group.rank == 0:
            self._write({})
            self._ours, self._swept = True, False

    def part(self, number: int) -> Checkpoint:
        """Return the file of some of the samples, which one process projects; it lies beside this one."""
        other = Checkpoint(f"{self._path}.{number}")
        other._header = {**self._header, "problem": {**self._header["problem"], "part": number}}
        other._ours, other._next, self._swept = True, time.monotonic() + _EVERY, True  # this one has the seed
        if other._path.is_file():
            with contextlib.suppress(FileError):  # that of an earlier plan, say, is written anew
                tensors, header = other._read()
                other._swept = header["problem"] == other._header["problem"] and bool(tensors)
        return other

    def load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state in the file, or the given state if there is none yet."""
        if self._group.size == 1:
            return self._load(state)
        found = self._group.first(lambda: {name: tensor.cpu() for name, tensor in self._load(state).items()})
        return {name: tensor.to(state[name].device, copy=True) for name, tensor in found.items()}

    def _load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not self._swept:
            return state
        stored = self._read()[0]
        if {name: _form(tensor) for name, tensor in stored.items()} != {name: _form(t) for name, t in state.items()}:
            self.refuse("its tensors have other names, shapes or dtypes")
        rows, here = stored["reference"].to(state["reference"]), state["reference"]
        if rows.shape != here.shape or not torch.allclose(rows, here, rtol=1e-3, atol=0.0):
            self.refuse("its rows or its noise are other numbers")
        # copies: the alignment of memory changes the last bits of products
        return {name: tensor.to(state[name].device, copy=True) for name, tensor in stored.items()}

    def save(self, state: Mapping[str, Tensor], *, interrupted: bool = False) -> None:
        """Write the state if enough time has passed, and in any case after an interruption."""
        start = time.monotonic()
        if self._group.rank:
            return
        if not (interrupted or start >= self._next):
            return
        self._interrupted = interrupted
        self._write(state)
        self._swept = True
        spent = time.monotonic() - start
        self._next = start + spent + max(_EVERY, spent / _SHARE)

    def refuse(self, why: str) -> NoReturn:
        """Refuse to continue from the file."""
        msg = (
            f"The checkpoint {self._path} belongs to another fit: {why}. Call fit as it was called then, delete the "
            "file, or pass another path as checkpoint."
        )
        raise FileError(msg)

    def _write(self, state: Mapping[str, Tensor]) -> None:
        try:
            io.save(self._path, state, self._header, what="checkpoint")
        except FileError as error:
            if not self._written:
                raise
            warn(f"{error} The fit goes on without: if it is killed, it can be resumed where the file left it.")
        else:
            self._written = True

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the header of the file, if it is a checkpoint."""
        advice = "delete it, or pass another path as checkpoint."
        try:
            tensors, header = io.read(self._path, what="checkpoint")
        except FileError as error:
            msg = f"{error} To fit anew, {advice}"
            raise FileError(msg) from error
        if header.get("kind") != KIND:
            msg = f"{self._path} holds a posterior, not a checkpoint: pass another path as checkpoint."
            raise FileError(msg)
        try:
            check_fields(fields_of(Header), header)
        except FileError as error:
            msg = f"The checkpoint {self._path} was altered since it was written: {advice}"
            raise FileError(msg) from error
        return tensors, header

    def _compare(self, here: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        divided = here["processes"] != stored.get("processes")
        shown = [
            f"another {name}" if name in _HASHED else f"{name} was {stored.get(name)!r} and is {value!r}"
            for name, value in here.items()
            if value != stored.get(name) and not (divided and name in _DIVIDED)
        ]
        if shown:
            self.refuse("; ".join(shown))


def _memory(plan: FitPlan) -> dict[str, int]:
    return asdict(Memory(plan.limit, plan.host, plan.halvings))


def _form(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the properties of a tensor that stay the same when finished samples are dropped."""
    return tensor.dtype, tuple(tensor.shape[1:])


def _identity(request: FitRequest) -> dict[str, Any]:
    """Return all that the directions depend on, except for the plan and the noise."""
    rows, network = request.rows, request.rows.network
    sigma = getattr(rows.likelihood, "sigma_noise", None)
    return {
        "n_samples": request.n_samples,
        "tolerance": request.tolerance,
        "projector": described(request.projector),
        "memory_limit": request.memory_limit,
        "rows": type(rows).__name__,
        "hessian": getattr(rows, "hessian", False),
        "likelihood": [rows.likelihood.name, list(sigma) if isinstance(sigma, tuple) else sigma],
        "parameters": list(network.names),
        "device": rows.device.type,
        "model": network.fingerprint(),
        "data": rows.examples.fingerprint(),
        "processes": rows.examples.group.size,
    }
