"""Kernels that can be differentiated, chosen by switches of the whole process for as long as someone needs them."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nullbayes.precision import full_precision


class Switches:
    """Switches that the first user sets and the last one puts back, whatever threads they are in.

    Parameters
    ----------
    name : str
        Under which this module has them: there is one of each, which copies share.
    switch : callable (stack)
        Sets them, and tells the stack how to put them back.
    """

    def __init__(self, name: str, switch: Callable[[ExitStack], None]) -> None:
        self._name, self._switch, self._lock = name, switch, threading.Lock()
        self._users, self._stack = 0, ExitStack()

    def __reduce__(self) -> str:
        return self._name

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold them for the time of a ``with`` block."""
        with self._lock:
            if not self._users:
                self._switch(self._stack)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._stack.close()


def _plain_attention(stack: ExitStack) -> None:
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet impl")


def _plain_recurrence(stack: ExitStack) -> None:
    backend: Any
    for backend in (torch.backends.mkldnn, torch.backends.cudnn):
        stack.callback(setattr, backend, "enabled", backend.enabled)
        backend.enabled = False


def _uncompiled(stack: ExitStack) -> None:
    stack.enter_context(torch.compiler.set_stance("force_eager"))


_attention = Switches("_attention", _plain_attention)
recurrent_kernels = Switches("recurrent_kernels", _plain_recurrence)
"""Hold torch's own LSTM and GRU: oneDNN's have no forward mode, cuDNN's no derivative in evaluation mode."""

eager_parts = Switches("eager_parts", _uncompiled)
"""Let parts of a network that were compiled run as they are written: what is compiled hides its layers."""


@contextlib.contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Take, for a while, kernels that can be differentiated as they are, and full precision.

    The fused attention kernels know neither forward mode nor ``vmap``. Where ``vmap`` knows an operation only one by
    one, torch warns of the time it takes; there is no other way to take.
    """
    with _attention(), full_precision():
        yield
