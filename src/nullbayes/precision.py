"""Full float32: no TensorFloat-32, no bfloat16 products, no autocast, for as long as rows are formed and multiplied.

On recent NVIDIA cards convolutions round their operands to 10 bits of mantissa unless one forbids it, many programs
allow the same for matrix products, and autocast goes down to half precision. A network bears that, a null space does
not: rows would be wrong by 1e-3, and forward and reverse mode would disagree.

Torch has two generations of switches. The older ones (``allow_tf32``, ``set_float32_matmul_precision``) refuse to be
read once the newer ones (``fp32_precision``, torch 2.9) have said something else, so both are kept in agreement here
wherever they were. The newer ones form a tree: a switch that was never set follows its parent. The switches belong to
the process: the first thread that wants full precision sets them, the last one puts them back.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Switch = tuple[str, str]  # backend and operation, as torch names them

_TREE: tuple[Switch, ...] = (  # parents first
    ("generic", "all"),
    ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip
_MATMULS: tuple[Switch, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))  # those that the older switches write, too
_CUDNN: tuple[Switch, ...] = (("cuda", "conv"), ("cuda", "rnn"))
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_lock = threading.RLock()
_users: list[contextlib.ExitStack] = []  # the first of them holds the switches, which are the whole process's
_here = threading.local()  # whether this thread is inside of a block, which then need not be entered again
_relaxed: list[str] = []  # what was allowed inside of them
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")

_read: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
_write: Callable[[str, str, str], None] | None = getattr(torch._C, "_set_fp32_precision_setter", None)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the precision of the tensors for the time of a ``with`` block, or of the function it decorates.

    Every switch is then as it was, after an exception, too; blocks may be nested.

    Examples
    --------
    >>> import torch
    >>> with torch.autocast("cpu"), full_precision():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    if getattr(_here, "inside", False) and not _relaxed and not any(map(torch.is_autocast_enabled, _AUTOCAST)):
        yield
        return
    with _lock:
        switches, again = _users[0] if _users else contextlib.ExitStack(), contextlib.ExitStack()
        if not _users or _relaxed:
            mine = again if _users else switches
            mine.enter_context(_switched("ieee", "highest", cudnn=False, tree=_TREE))
            mine.enter_context(_plain_reductions())
        _users.append(switches)
    try:
        with contextlib.ExitStack() as stack:  # autocast belongs to a thread
            for device in _AUTOCAST:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            _here.inside = True
            yield
    finally:
        _here.inside = False
        with _lock:
            again.close()
            _users.pop()
            if not _users:
                switches.close()


@contextlib.contextmanager
def tensor_float32() -> Iterator[None]:
    """Allow TensorFloat-32 in matrix products on a GPU for a while: for operands that 10 bits of mantissa hold exactly.

    Sums are still accumulated in float32. Every switch is then as it was.
    """
    with _switched("tf32", "high", cudnn=None, tree=_MATMULS[:1]):
        _relaxed.append("tf32")
        try:
            yield
        finally:
            _relaxed.pop()


@contextlib.contextmanager
def _switched(value: str, legacy: str, *, cudnn: bool | None, tree: tuple[Switch, ...]) -> Iterator[None]:
    """Set the newer switches in ``tree`` to ``value``, the older ones to ``legacy`` and ``cudnn``; put all back."""
    matmul_before = _legacy(torch.get_float32_matmul_precision)
    cudnn_before = _legacy(lambda: torch.backends.cudnn.allow_tf32)
    before = _tree_now()
    back: dict[Switch, str] = {}  # "none": follow the parent
    try:
        for switch in tree:
            if switch in before and _get(switch) != value:
                # where all above it were set and it differs still, it has a value of its own
                back[switch] = before[switch] if tree == _TREE else "none"
                _set(switch, value)
        if matmul_before not in (None, legacy):
            _legacy(lambda: torch.set_float32_matmul_precision(legacy))
            back = {**dict.fromkeys(_MATMULS, "none"), **back}
            for switch in _MATMULS:
                if switch in before and switch not in tree:
                    _set(switch, before[switch])  # a CPU's products are not meant
        if cudnn is not None and cudnn_before not in (None, cudnn):
            _legacy(lambda: setattr(torch.backends.cudnn, "allow_tf32", cudnn))
            back = {**dict.fromkeys(_CUDNN, "none"), **back}
        yield
    finally:
        if matmul_before not in (None, legacy):
            _legacy(lambda: torch.set_float32_matmul_precision(matmul_before))
        if cudnn is not None and cudnn_before not in (None, cudnn):
            _legacy(lambda: setattr(torch.backends.cudnn, "allow_tf32", cudnn_before))
        for switch, old in back.items():
            if switch in before:
                _set(switch, old)
        for switch, old in before.items():
            if _get(switch) != old:
                _set(switch, old)


def _tree_now() -> dict[Switch, str]:
    """Return what the newer switches say, parents first; nothing for a torch that has none."""
    if _read is None or _write is None:
        return {}
    found = {}
    for switch in _TREE:
        with contextlib.suppress(RuntimeError):  # one that this torch does not know
            found[switch] = _read(*switch)
    return found


def _get(switch: Switch) -> str:
    assert _read is not None
    return _read(*switch)


def _set(switch: Switch, value: str) -> None:
    assert _write is not None
    _write(*switch, value)


def _legacy(action: Callable[[], Any]) -> Any:
    """Use one of the older switches; None where torch refuses, because the newer ones were used to disagree with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 calls them deprecated
        try:
            return action()
        except RuntimeError:
            return None


@contextlib.contextmanager
def _plain_reductions() -> Iterator[None]:
    """Sum products of half-precision parameters in float32."""
    matmul = torch.backends.cuda.matmul
    before: dict[str, Any] = {}
    for name in _REDUCED:
        with contextlib.suppress(AttributeError, AssertionError):  # one that this torch does not know
            old = getattr(matmul, name)
            split = getattr(matmul, f"{name}_split_k", None) if "reduction" in name else None
            before[name] = old if split is None else (old, split)
    try:
        for name, old in before.items():
            if old is not False and old != (False, True):
                setattr(matmul, name, False)
        yield
    finally:
        for name, old in before.items():
            setattr(matmul, name, old)
