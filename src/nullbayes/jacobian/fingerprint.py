"""Hashes of tensors, to know them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Any:
    """Return the bytes of a tensor in the order of its entries, as an array."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of tensors: names, shapes, dtypes and bytes, in the order they come in."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw(tensor))
    return digest.hexdigest()
