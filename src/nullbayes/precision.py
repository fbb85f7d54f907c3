"""Switches of torch that belong to the whole process: full float32, and operations that can be differentiated.

On recent NVIDIA cards convolutions round their operands to 10 bits of mantissa unless one forbids it, many programs
allow the same for matrix products, and autocast goes down to half precision. A network tolerates that, a null space
does not: rows would be wrong by 1e-3, and forward and reverse mode would disagree.

Torch has two generations of precision switches. The older ones (``allow_tf32``, ``set_float32_matmul_precision``) raise
an error when they are read after the newer ones (``fp32_precision``) have said something else, so this module keeps
both in agreement wherever they were. The newer ones form a tree: a switch that was never set follows its parent.

All switches are counted under one lock: the first user sets them and the last one puts them back, in whatever threads
they are. TensorFloat-32 is on only while *every* thread that is inside a block allows it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from nullbayes.torch_internals import Switch, fp32_precision, parametrizations_computed, set_fp32_precision

_TREE: tuple[Switch, ...] = (  # parents first
    ("generic", "all"),
    ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"),
    ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip
_MATMULS: tuple[Switch, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))  # the older switches write these as well
_CUDNN: tuple[Switch, ...] = (("cuda", "conv"), ("cuda", "rnn"))
_REDUCED = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")

_lock = threading.RLock()


class Switches:
    """Switches that the first user sets and the last one puts back, in whatever threads they are.

    ``switch(stack)`` sets them, and tells the stack how to put them back. There is one object of each ``name`` in this
    module, which copies share.
    """

    def __init__(self, name: str, switch: Callable[[ExitStack], None]) -> None:
        self._name, self._switch = name, switch
        self._users, self._stack = 0, ExitStack()

    def __reduce__(self) -> str:
        return self._name

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the switches for the time of a ``with`` block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Count one more user; the first one sets the switches."""
        with _lock:
            if not self._users:
                self._switch(self._stack)
            self._users += 1

    def leave(self) -> None:
        """Count one user less; the last one puts the switches back."""
        with _lock:
            self._users -= 1
            if not self._users:
                self._stack.close()


# --- precision --------------------------------------------------------------------------------------------------------


def _set_full_precision(stack: ExitStack) -> None:
    stack.enter_context(_switched("ieee", "highest", cudnn=False, tree=_TREE))
    stack.enter_context(_float32_sums())


def _allow_tensor_float32(stack: ExitStack) -> None:
    stack.enter_context(_switched("tf32", "high", cudnn=None, tree=_MATMULS[:1]))


_full = Switches("_full", _set_full_precision)
_tf32 = Switches("_tf32", _allow_tensor_float32)
_innermost = Counter[Switches]()  # of the threads that are inside blocks: how many have which as their innermost one
_here = threading.local()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the precision of the tensors for the time of a ``with`` block, or of the function it decorates.

    Every switch is then as it was, also after an exception. Blocks may be nested.

    Examples
    --------
    >>> import torch
    >>> with torch.autocast("cpu"), full_precision():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    cast = [device for device in _AUTOCAST if torch.is_autocast_enabled(device)]
    blocks = _blocks()
    if not cast and blocks and blocks[-1] is _full:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_inside(_full))
        for device in cast:  # which belongs to the thread
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def tensor_float32() -> Iterator[None]:
    """Allow TensorFloat-32 in matrix products on a GPU for a while: for operands that 10 bits of mantissa hold exactly.

    Sums are still accumulated in float32, and everything else is computed in full precision. While another thread
    wants full precision, products are computed in full precision here, too.
    """
    with _inside(_tf32):
        yield


def _blocks() -> list[Switches]:
    """Return the blocks that this thread is inside, the innermost one last."""
    blocks: list[Switches] = _here.__dict__.setdefault("blocks", [])
    return blocks


@contextlib.contextmanager
def _inside(block: Switches) -> Iterator[None]:
    blocks = _blocks()
    _full.enter()
    _change(blocks, lambda: blocks.append(block))
    try:
        yield
    finally:
        _change(blocks, lambda: _remove_last(blocks, block))
        _full.leave()


def _remove_last(blocks: list[Switches], block: Switches) -> None:
    del blocks[len(blocks) - 1 - blocks[::-1].index(block)]


def _change(blocks: list[Switches], change: Callable[[], None]) -> None:
    """Enter or leave a block of a thread, and turn TensorFloat-32 on where all threads now allow it, else off."""
    with _lock:
        before = _innermost[_tf32] > 0 and not _innermost[_full]
        _innermost.subtract(blocks[-1:])
        change()
        _innermost.update(blocks[-1:])
        after = _innermost[_tf32] > 0 and not _innermost[_full]
        if after and not before:
            _tf32.enter()
        if before and not after:
            _tf32.leave()


@contextlib.contextmanager
def _switched(value: str, older: str, *, cudnn: bool | None, tree: tuple[Switch, ...]) -> Iterator[None]:
    """Set the newer switches in ``tree`` to ``value``, the older ones to ``older`` and ``cudnn``; put all back."""
    matmul_before = _older(torch.get_float32_matmul_precision)
    cudnn_before = _older(lambda: torch.backends.cudnn.allow_tf32)
    before = {switch: fp32_precision(switch) for switch in _TREE}
    back: dict[Switch, str] = {}  # "none": follow the parent
    try:
        for switch in tree:
            if fp32_precision(switch) != value:
                # where all above it were set and it differs still, it has a value of its own
                back[switch] = before[switch] if tree == _TREE else "none"
                set_fp32_precision(switch, value)
        if matmul_before not in (None, older):
            _older(lambda: torch.set_float32_matmul_precision(older))
            back = {**dict.fromkeys(_MATMULS, "none"), **back}
            for switch in _MATMULS:
                if switch not in tree:
                    set_fp32_precision(switch, before[switch])  # products on a CPU are not meant
        if cudnn is not None and cudnn_before not in (None, cudnn):
            _older(lambda: setattr(torch.backends.cudnn, "allow_tf32", cudnn))
            back = {**dict.fromkeys(_CUDNN, "none"), **back}
        yield
    finally:
        if matmul_before not in (None, older):
            _older(lambda: torch.set_float32_matmul_precision(matmul_before))
        if cudnn is not None and cudnn_before not in (None, cudnn):
            _older(lambda: setattr(torch.backends.cudnn, "allow_tf32", cudnn_before))
        for switch, old in back.items():
            set_fp32_precision(switch, old)
        for switch, old in before.items():
            if fp32_precision(switch) != old:
                set_fp32_precision(switch, old)


def _older(action: Callable[[], Any]) -> Any:
    """Use one of the older switches; None where torch refuses because the newer ones disagree with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them deprecated
        try:
            return action()
        except RuntimeError:
            return None


@contextlib.contextmanager
def _float32_sums() -> Iterator[None]:
    """Sum products of half-precision operands in float32."""
    matmul = torch.backends.cuda.matmul
    before: dict[str, Any] = {}
    for name in _REDUCED:
        old = getattr(matmul, name)
        before[name] = (old, getattr(matmul, f"{name}_split_k")) if "reduction" in name else old
    try:
        for name, old in before.items():
            if old is not False and old != (False, True):
                setattr(matmul, name, False)
        yield
    finally:
        for name, old in before.items():
            setattr(matmul, name, old)


# --- operations that can be differentiated ----------------------------------------------------------------------------


def _use_plain_attention(stack: ExitStack) -> None:
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet impl")


def _use_plain_recurrence(stack: ExitStack) -> None:
    backend: Any
    for backend in (torch.backends.mkldnn, torch.backends.cudnn):
        stack.callback(setattr, backend, "enabled", backend.enabled)
        backend.enabled = False


def _run_uncompiled(stack: ExitStack) -> None:
    stack.enter_context(torch.compiler.set_stance("force_eager"))


def _compute_parametrizations(stack: ExitStack) -> None:
    stack.enter_context(parametrizations_computed())


_plain_attention = Switches("_plain_attention", _use_plain_attention)
plain_recurrence = Switches("plain_recurrence", _use_plain_recurrence)
"""Use torch's own LSTM and GRU: those of oneDNN have no forward mode, those of cuDNN no derivative in evaluation."""

uncompiled = Switches("uncompiled", _run_uncompiled)
"""Run compiled parts of a network as they are written: compiled code hides its layers."""

computed_parametrizations = Switches("computed_parametrizations", _compute_parametrizations)
"""Compute parametrized tensors from the parameters of each call: ``parametrize.cached()`` keeps those of an earlier."""


class WithoutAutocast(TorchFunctionMode):
    """Turns off the autocast that a network turns on by itself, within its ``forward``, for every operation.

    ``seen`` says whether there was any. ``device`` is the type of device that the network computes on.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.seen = device, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation in the precision of its operands."""
        if not torch.is_autocast_enabled(self.device):
            return func(*args, **(kwargs or {}))
        self.seen = True
        with torch.autocast(self.device, enabled=False):
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record for differentiation, whatever the mode around the call."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Use operations that can be differentiated in every mode, in full precision, for the time of a ``with`` block.

    The fused attention kernels support neither forward mode nor ``vmap``. Where ``vmap`` runs an operation once per
    example, torch warns about the time it takes; there is no alternative, so the warning is not shown.
    """
    with _plain_attention(), full_precision():
        yield
