"""Several processes that fit one posterior together, over torch.distributed: who they are, and what they exchange.

A :class:`Group` adds up tensors, collects values, and lets the first process decide for all. Before every exchange the
processes shake hands: each says which line of the library it is at, and how much it sends, over gloo. So an error of
one process is raised by all of them, with its message, and a process that was killed is noticed at the next handshake,
on GPUs as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nullbayes import errors, limits
from nullbayes.errors import DistributedError, NullBayesError, NullBayesWarning, ProcessLostError, SettingsError

T = TypeVar("T")
_FAILED = 0  # what a process says in a handshake, if it does not say which line comes next
_HOURS = 12  # that a process may take to its next handshake; one that was killed is noticed at once
_TOLD = "_nullbayes_told"  # attribute of an error that every process knows of


@dataclass(frozen=True)
class Group:
    """The processes that work on one fit; by default this one alone, which exchanges nothing.

    Attributes
    ----------
    rank, size : int
        The number of this process, from 0, and the number of all.
    neighbours : int
        How many of them run on this machine and share its memory.
    control, nccl : process groups of torch.distributed
        Over gloo, for handshakes and for tensors on CPUs; and over NCCL, if there is one, for tensors on GPUs.

    Examples
    --------
    >>> group = Group()
    >>> group.sum(torch.ones(2)), group.gather("mine"), group.first(lambda: "decided")
    (tensor([1., 1.]), ['mine'], 'decided')
    """

    rank: int = 0
    size: int = 1
    neighbours: int = 1
    control: Any = None
    nccl: Any = None

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, to all of them; shapes are equal."""
        if self.size == 1:
            return tensor
        total, channel = self._sendable(tensor)
        self._shake_hands(tensor.numel())
        with _noticing():
            dist.all_reduce(total, group=channel)
        return total.to(tensor.device)

    def join(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the tensors of all processes in order of rank; they may differ in size along ``dim``."""
        if self.size == 1:
            return tensor
        sizes = [int(size) for size in self.gather(tensor.shape[dim])]
        moved = tensor.movedim(dim, 0)
        padded = moved.new_zeros(max(sizes), *moved.shape[1:])
        padded[: len(moved)] = moved
        padded, channel = self._sendable(padded)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._shake_hands(padded.numel())
        with _noticing():
            dist.all_gather(parts, padded, group=channel)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, dim).to(tensor.device).contiguous()

    def broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the tensor of one process, to all of them; shapes are equal."""
        if self.size == 1:
            return tensor
        sent, channel = self._sendable(tensor)
        self._shake_hands(tensor.numel())
        with _noticing():
            dist.broadcast(sent, src=dist.get_global_rank(channel, rank) if channel else rank, group=channel)
        return sent.to(tensor.device)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, to all of them: any that can be pickled, in order of rank."""
        if self.size == 1:
            return [value]
        self._shake_hands()
        return self._gathered(value)

    def first(self, work: Callable[[], T]) -> T:
        """Return what the first process has computed, to all processes."""
        if self.size == 1:
            return work()
        found: list[T | None] = self.gather(work() if self.rank == 0 else None)
        return found[0]  # type: ignore[return-value]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of any process in all of them, at their next exchange or at the end of a ``with`` block.

        The process that failed raises its own error. The others raise one of the same class, with the message and the
        number of that process.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except BaseException as error:
            if not getattr(error, _TOLD, False):
                with contextlib.suppress(DistributedError):  # the error itself matters more
                    self._tell(error)
                _mark(error)
            raise
        self._shake_hands()

    @contextlib.contextmanager
    def one_voice(self) -> Iterator[None]:
        """Let only the first process warn, and let all fail if one fails."""
        with warnings.catch_warnings() if self.rank else contextlib.nullcontext(), self.together():
            if self.rank:
                warnings.simplefilter("ignore", NullBayesWarning)
            yield

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let each process do something else during a ``with`` block, in which it may exchange nothing."""
        token = _apart.set(True)
        try:
            yield
        finally:
            _apart.reset(token)

    def attempt(self, work: Callable[[], T]) -> T | limits.OutOfMemory:
        """Return what ``work`` returns; if memory runs out in any process, the error, in all of them."""

        def shared() -> T:
            with self.together():
                return work()

        return limits.attempt(shared)

    def _tell(self, error: BaseException) -> None:
        self._exchange(_FAILED, 0)
        self._gathered(_Failure.of(error))

    def _shake_hands(self, size: int = 0) -> None:
        """Tell the others what comes next; raise their error, or one that says that they are out of step."""
        if _apart.get():
            msg = (
                "nb.in_parallel gives each process other inputs, but the processes divide the parameters of this "
                "posterior and predict the same inputs together: call posterior.predict(x) itself in all of them."
            )
            raise SettingsError(msg)
        said = self._exchange(_place(), size)
        if any(place == _FAILED for place, _ in said):
            failures = self._gathered(None)
            rank, failure = next((i, one) for i, one in enumerate(failures) if isinstance(one, _Failure))
            raise _mark(failure.error(rank))
        if len(set(said)) > 1:
            msg = (
                "The processes do not do the same: every process must make the same calls with parallel=..., in the "
                "same order, and with the same arguments except for the data."
            )
            raise _mark(DistributedError(msg))

    def _exchange(self, place: int, size: int) -> list[tuple[int, int]]:
        mine = torch.tensor([place, size], dtype=torch.int64, device="cpu")
        said = [torch.empty_like(mine) for _ in range(self.size)]
        with _noticing():
            dist.all_gather(said, mine, group=self.control)
        return [(int(place), int(size)) for place, size in said]

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _noticing():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def _sendable(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a copy to send, and the process group to send it over.

        It is made before the handshake: if memory runs out, the others hear of it and do not wait.
        """
        on_gpu = tensor.is_cuda and self.nccl is not None
        copied = tensor.detach().to(tensor.device if on_gpu else "cpu", copy=True)
        return copied.contiguous(), self.nccl if on_gpu else self.control


ALONE = Group()
_apart = ContextVar("apart", default=False)  # whether the processes do different things, and must not exchange anything


def _place() -> int:
    """Return a number for the line that asks for an exchange, above zero: the same in processes that are in step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, contextlib.__file__, limits.__file__):
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_qualname}:{frame.f_lineno}"
    return 1 + zlib.crc32(where.encode())


@dataclass(frozen=True)
class _Failure:
    """An error, as one process tells the others of it."""

    kind: str
    message: str
    out_of_memory: bool

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        return cls(type(error).__name__, str(error), isinstance(error, Exception) and limits.is_out_of_memory(error))

    def error(self, rank: int) -> BaseException:
        """Return the error to raise in another process."""
        if self.out_of_memory:
            return torch.OutOfMemoryError(f"CUDA out of memory in process {rank}: {self.message}")
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, NullBayesError):
            return known(f"Process {rank}: {self.message}")
        return DistributedError(f"Process {rank} failed with {self.kind}: {self.message}")


E = TypeVar("E", bound=BaseException)


def _mark(error: E) -> E:
    setattr(error, _TOLD, True)
    return error


@contextlib.contextmanager
def _noticing() -> Iterator[None]:
    """Say in plain words that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0].split(". ")[0] if str(error).strip() else type(error).__name__
        msg = (
            "Another process of this run no longer answers: it was killed, or the connection to it broke. Start the "
            f"run again; with checkpoint=... it continues where it was. ({said})"
        )
        raise _mark(ProcessLostError(msg)) from error


def init(*, timeout: float = 3600.0 * _HOURS) -> Group:
    """Join the other processes that ``torchrun`` started, over NCCL if each has a GPU, and over gloo otherwise.

    It calls ``torch.distributed.init_process_group``, unless that was done already, and makes the GPU of this process
    the current one. Without ``torchrun`` it does nothing, so that the same script also runs by itself.

    Parameters
    ----------
    timeout : float
        Seconds after which a process that does not answer counts as lost. One that was killed is noticed at once.

    Returns
    -------
    Group
        The processes, with ``rank`` and ``size``.

    Examples
    --------
    A script for ``torchrun --nproc-per-node 4 script.py``; ``rank`` is 0 in one of the processes:

    >>> import nullbayes as nb
    >>> group = nb.distributed.init()
    >>> group.rank, group.size
    (0, 1)
    """
    if not dist.is_available() or (not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        return ALONE
    if not dist.is_initialized():
        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        # NCCL does not work where processes share a GPU
        nccl = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus and dist.is_nccl_available()
        dist.init_process_group("nccl" if nccl else "gloo", timeout=timedelta(seconds=timeout))
        atexit.register(_leave)
    return _everyone(timeout)


def resolve(parallel: str | None) -> Group:
    """Return the processes of a call with ``parallel=...``, for methods of your own that several processes share.

    Parameters
    ----------
    parallel : "data", "samples", "parameters" or None
        As for ``fit``.

    Returns
    -------
    Group
        This process alone for None, or if it was started by itself; otherwise all processes.

    Raises
    ------
    SettingsError
        If ``torchrun`` has started several processes, and ``init`` was not called.

    Examples
    --------
    >>> resolve(None).size, resolve("data").size
    (1, 1)
    """
    if parallel is None:
        return ALONE
    if parallel not in ("data", "samples", "parameters"):
        msg = f'parallel must be "data", "samples", "parameters" or None, not {parallel!r}.'
        raise SettingsError(msg)
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            msg = f'parallel="{parallel}" needs the other processes: call nb.distributed.init() first.'
            raise SettingsError(msg)
        return ALONE
    return _everyone(3600.0 * _HOURS)


def _leave(channel: Any = None) -> None:
    """Close a process group before the interpreter ends: gloo's threads abort a process that still has one."""
    _groups.clear()
    with contextlib.suppress(Exception):  # the user has closed it already, or another process is gone
        if dist.is_initialized():
            dist.destroy_process_group(channel)


_groups: dict[Any, Group] = {}  # of the current world; its channels can be opened only by all processes together


def _everyone(timeout: float) -> Group:
    world = dist.group.WORLD
    if dist.get_world_size() == 1:
        return ALONE
    if world not in _groups:
        _groups.clear()
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        atexit.register(_leave, control)
        alone = Group(
            dist.get_rank(), dist.get_world_size(), 1, control, world if "nccl" in dist.get_backend() else None
        )
        hosts = alone.gather(socket.gethostname())
        neighbours = hosts.count(hosts[alone.rank])
        _groups[world] = Group(alone.rank, alone.size, neighbours, control, alone.nccl)
    return _groups[world]
