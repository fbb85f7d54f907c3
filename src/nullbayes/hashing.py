r"""Hashes of tensors: one for named tensors as a whole, and a quick checksum for each example of some data.

The checksum of an example takes its bits as words :math:`w_i` of 32 bits: it is :math:`\sum_i k_i w_i` modulo
:math:`2^{64}` with random :math:`k_i`. Other words give another sum with a chance of at least :math:`1 - 2^{-32}`, and
words that are moved count as other words. Sums of integers do not depend on their order, so that every device computes
the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_WORDS = 2**14  # of 64 bits: longer examples are summed in segments, and then the sums
_AT_A_TIME = {"cpu": 2**15 - 1, "cuda": 2**24}  # words per step: on a CPU they stay in its cache, and in one thread
_STEP = 0x1E3779B97F4A7C15  # odd, so that multiplying with it loses nothing


def raw(tensor: Tensor) -> Any:
    """Return the bytes of a tensor in the order of its entries, as an array."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def fingerprint(named: Iterable[tuple[str, Tensor]], text: str = "") -> str:
    """Return the SHA-256 of a text and of tensors: names, shapes, dtypes and bytes, in the given order."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw(tensor))
    return digest.hexdigest()


def checksums(leaves: Iterable[Tensor], n: int, before: Tensor | None = None) -> Tensor:  # (n,) int64
    """Return the checksum of each of ``n`` examples. A tensor without dimensions belongs to all of them.

    ``before`` are the checksums of other tensors that come before these.
    """
    total = torch.zeros(n, dtype=torch.int64, device="cpu") if before is None else before
    shares = [_summed(_words(leaf.detach() if leaf.ndim else leaf.detach()[None])) for leaf in leaves]
    if len({share.device for share in shares}) == 1:  # one transfer for all of them
        shares = list(torch.stack([share.expand(n) for share in shares]).cpu())
    for share in shares:
        total = total * _STEP + share.cpu()
    return total


def _words(leaf: Tensor) -> Tensor:  # (n, ...) -> (n, w) int64
    """Return the bits of each example as words of 64 bits; the last one is filled up with zeros."""
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    flat = leaf.resolve_neg().reshape(len(leaf), -1)
    rest = -flat.shape[1] * flat.element_size() % 8
    # torch calls a single example contiguous whatever its stride is
    if (
        not flat.is_contiguous()
        or flat.stride(1) != 1
        or (not rest and flat.storage_offset() * flat.element_size() % 8)
    ):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return (functional.pad(flat.view(torch.uint8), (0, rest)) if rest else flat).view(torch.int64)


def _summed(words: Tensor) -> Tensor:  # (n, w) -> (n,)
    width = words.shape[1]
    if width > _WORDS:
        segments = [_summed(segment) for segment in words.split(_WORDS, dim=1)]
        return _summed(torch.stack(segments, dim=1))
    low, high = (key[:width] for key in _keys(words.device))
    rows = max(1, _AT_A_TIME.get(words.device.type, 2**15 - 1) // max(1, width))
    # the upper half of a word gets a key of its own: the product with the first key would lose its upper bits
    if words.is_cuda:  # which has no matrix products of integers
        parts = [torch.addcmul(part * low, part >> 32, high).sum(1) for part in words.split(rows)]
    else:
        parts = [part @ low + (part >> 32) @ high for part in words.split(rows)]
    return torch.cat(parts)


@functools.cache
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0x64617461)
    low, high = torch.randint(
        -(2**63), 2**63 - 1, (2, _WORDS), generator=generator, dtype=torch.int64, device="cpu"
    ).to(device)
    return low, high
