"""Arguments as users give them: data, counts, numbers, memory, and the noise of a seed or a base distribution."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.batches import NUMBERED, is_array
from nullbayes.jacobian.network import Network
from nullbayes.limits import free_memory

Base = Tensor | Mapping[str, Tensor] | Callable[[int, torch.Generator], Tensor | Mapping[str, Tensor]]
PROBES = 8  # isotropic vectors that measure the null space when the base distribution is another
_SEEDS = 2**32
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def data_and_count(loader: Any, targets: Any, n_samples: Any, least: int = 0) -> tuple[Any, int]:
    """Return the data and the number of samples of ``fit(loader, n)``, ``fit(x, y)`` or ``fit(x, y, n)``."""
    pair = is_array(targets)
    if isinstance(targets, (list, tuple)):
        words = any(isinstance(target, str) for target in targets)
        how = f"pass the numbers of the classes. {NUMBERED}" if words else "torch.as_tensor makes one of it."
        msg = f"Targets must be a tensor or an array, not a {type(targets).__name__}{' of words' * words}: {how}"
        raise DataError(msg)
    count = whole(n_samples if pair or targets is None else targets)
    if count < least:
        msg = f"n_samples must be at least {least} to speak of a variance, not {count}."
        raise SettingsError(msg)
    return (loader, targets) if pair else loader, count


def whole(value: Any, name: str = "n_samples") -> int:
    """Return a whole number of Python, NumPy or torch as an int, or refuse what is not one."""
    try:
        return operator.index(value)
    except TypeError:
        msg = f"{name} must be a whole number, not {reprlib.repr(value)[:60]}."
        raise SettingsError(msg) from None


def positive(value: Any) -> float | None:
    """Return a positive finite number as a float, and None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if 0 < number < math.inf else None


def check_precision(value: str | float) -> str | float:
    """Return a prior precision or the name of a rule for it, or refuse anything else."""
    if isinstance(value, str):
        if value in ("auto", "optimal", "paper"):
            return value
    elif (number := positive(value)) is not None:
        return number
    msg = f'prior_precision must be a positive number, "auto", "optimal" or "paper", not {value!r}.'
    raise SettingsError(msg)


def memory_limit_bytes(limit: int | str | None, device: torch.device) -> int:
    """Return a limit in bytes: a number, a string such as "8GB", or a share of what is free now."""
    if limit is None:
        return int((0.85 if device.type == "cuda" else 0.6) * free_memory(device))
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]?)(i?B)?\s*", limit, flags=re.IGNORECASE)
        if match is None:
            msg = f'memory_limit={limit!r} is not a size: write bytes as a number, or a string such as "8GB".'
            raise SettingsError(msg)
        limit = int(float(match[1]) * _UNITS[match[2].upper()])
    if not 0 < limit < math.inf:
        msg = f"memory_limit must be positive and finite, a number of bytes, not {limit}."
        raise SettingsError(msg)
    return int(limit)


def host_memory_bytes(device: torch.device) -> int:
    """Return half of the free host memory for a device with memory of its own, and 0 for the CPU."""
    return 0 if device.type == "cpu" else free_memory(torch.device("cpu")) // 2


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a posterior, from which all its samples follow."""
    if not isinstance(generator, torch.Generator | None):
        msg = f"generator must be a torch.Generator, not {generator!r}: torch.Generator().manual_seed(seed) makes one."
        raise SettingsError(msg)
    device = generator.device if generator is not None else torch.device("cpu")
    return int(torch.randint(_SEEDS, (1,), generator=generator, device=device))


def normal(network: Network, seed: int, start: int, n: int, size: int | None = None) -> Tensor:  # (n, size or P)
    """Draw samples ``start`` to ``start + n`` on the CPU, each with a generator of its own.

    A sample depends only on the seed and on its number, not on the device or on how many samples are drawn with it.
    Where processes divide the parameters, each draws all numbers of a sample and keeps its own.
    """

    def one(i: int) -> Tensor:
        generator, n = torch.Generator().manual_seed((seed + i) % _SEEDS), size or network.whole.n_parameters
        drawn = torch.randn(n, generator=generator, dtype=network.dtype, device="cpu")
        return drawn if size else network.own_columns(drawn).clone()

    return torch.stack([one(start + i) for i in range(n)])


def based(network: Network, base: Base, seed: int, start: int, n: int) -> Tensor:  # (n + PROBES, P)
    """Draw samples of the base distribution, followed by isotropic probes."""
    if callable(base):
        base = base(n, torch.Generator().manual_seed((seed + start) % _SEEDS))
    elif start:
        msg = (
            "The base distribution was given as samples, not as a callable (n, generator): "
            "there are no more to extend with."
        )
        raise SettingsError(msg)
    whole = network.whole
    flat = whole.flatten(base) if isinstance(base, Mapping) else base
    if flat.shape != (n, whole.n_parameters):
        msg = (
            f"The base distribution gave shape {tuple(flat.shape)}; "
            f"needed is ({n}, {whole.n_parameters}): samples, parameters."
        )
        raise SettingsError(msg)
    own = network.own_columns(flat.detach()).to("cpu", network.dtype)
    return torch.cat([own, normal(network, seed, _SEEDS // 2 + start, PROBES)])


@dataclass(frozen=True)
class Noise:
    """The noise to project: a base distribution, or None for N(0, I), and the seed of all samples."""

    base: Base | None
    seed: int

    def draw(self, network: Network, start: int, n: int) -> Tensor:  # (n, P); (n + PROBES, P) from a base
        """Return the noise of samples ``start`` to ``start + n``."""
        if self.base is None:
            return normal(network, self.seed, start, n)
        return based(network, self.base, self.seed, start, n)


def lost(n: int, generator: torch.Generator) -> Tensor:
    """Stand in for the base distribution of a posterior that was loaded or copied, and refuse to draw from it."""
    msg = "The posterior has a base distribution, which no file or copy holds: fit a new one to have more samples."
    raise SettingsError(msg)
