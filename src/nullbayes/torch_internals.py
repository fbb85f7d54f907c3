"""Every use of private names of torch, in one place, so that a new release of torch is checked against one file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

Switch = tuple[str, str]  # backend and operation, as torch names them


def fp32_precision(switch: Switch) -> str:
    """Return what torch says about the precision of an operation in float32: "ieee", "tf32", "bf16" or "none"."""
    return torch._C._get_fp32_precision_getter(*switch)


def set_fp32_precision(switch: Switch, value: str) -> None:
    """Set the precision of an operation; the public setter of ``mkldnn`` sets that of all backends instead."""
    torch._C._set_fp32_precision_setter(*switch, value)


def before_compilation(model: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped, or None if this module is not such a wrapper."""
    inner: Any = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks are registered on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch normalization of any dimension."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


@contextlib.contextmanager
def parametrizations_computed() -> Iterator[None]:
    """Compute parametrized tensors at every call, also inside of ``parametrize.cached()``, which counts its users."""
    held = parametrize._cache_enabled
    parametrize._cache_enabled -= held
    try:
        yield
    finally:
        parametrize._cache_enabled += held


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Let ``torch.compiler.is_exporting()`` be true, so that models leave out what depends on the values of inputs."""
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before
