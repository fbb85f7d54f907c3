"""Random tensors that are the same on every device: drawn on the device of their generator, then moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nullbayes import testing


def _moving(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def moved(*args: Any, generator: torch.Generator, **options: Any) -> Tensor:
        return draw(*args, generator=generator, device=generator.device, **options).to(torch.get_default_device())

    return moved


rand, randint, randn, randperm = (_moving(draw) for draw in (torch.rand, torch.randint, torch.randn, torch.randperm))


def matrix_from_singular_values(*args: Any) -> Tensor:
    """The library's, moved like the rest."""
    return testing.matrix_from_singular_values(*args).to(torch.get_default_device())


def seeded(seed: int = 0) -> torch.Generator:
    """A new generator on the CPU."""
    return torch.Generator().manual_seed(seed)
