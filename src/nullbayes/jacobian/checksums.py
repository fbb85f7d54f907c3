r"""A checksum for each example, so that data that change are noticed when they are read again.

The bits of an example are taken as words :math:`w_i` of 32 bits, and :math:`\sum_i k_i w_i` modulo :math:`2^{64}` with
random :math:`k_i` is its checksum: other words give another sum but for a chance of at most :math:`2^{-32}`, and moved
words are other words. Sums of integers do not depend on their order, so that every device finds the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

_WORDS = 2**14  # of 64 bits: longer examples are summed in segments, and the sums summed
_AT_A_TIME = {"cpu": 2**15 - 1, "cuda": 2**24}  # words in work: on a CPU they stay in its cache, and in one thread
_STEP = 0x1E3779B97F4A7C15  # odd, so that no leaf's share is lost


def checksums(leaves: Iterable[Tensor], n: int) -> Tensor:  # (n,) int64
    """Return the checksum of each of ``n`` examples; what has no dimension belongs to all of them."""
    total = torch.zeros(n, dtype=torch.int64, device="cpu")
    for leaf in leaves:
        share = _summed(_words(leaf.detach() if leaf.ndim else leaf.detach()[None]))
        total = total * _STEP + share.cpu()
    return total


def _words(leaf: Tensor) -> Tensor:  # (n, ...) -> (n, w) int64
    """Return the bits of each example as words of 64; those that do not fill the last are padded with zeros."""
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    flat = leaf.resolve_neg().reshape(len(leaf), -1)
    rest = -flat.shape[1] * flat.element_size() % 8
    # a single example counts as contiguous whatever its stride
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
    # the upper half of a word, shifted, has a key of its own: the first one alone would lose its upper bits
    if words.is_cuda:  # where integers have no matrix products
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
