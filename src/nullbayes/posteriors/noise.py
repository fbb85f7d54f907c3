"""The noise that is projected: N(0, I), or samples of another distribution around the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.network import Network

Base = Tensor | Mapping[str, Tensor] | Callable[[int, torch.Generator], Tensor | Mapping[str, Tensor]]
PROBES = 8  # extra isotropic vectors that measure the kernel when the base distribution is another
_SEEDS = 2**32


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a posterior, from which all its samples follow."""
    if not isinstance(generator, torch.Generator | None):
        msg = f"generator must be a torch.Generator, not {generator!r}: torch.Generator().manual_seed(seed) makes one."
        raise SettingsError(msg)
    device = generator.device if generator is not None else torch.device("cpu")
    return int(torch.randint(_SEEDS, (1,), generator=generator, device=device))


def normal(network: Network, seed: int, start: int, n: int, size: int | None = None) -> Tensor:  # (n, size or P)
    """Draw samples ``start`` to ``start + n``, on the CPU, each by a generator of its own.

    A sample depends on the seed and on its number alone: not on how many are drawn with it, nor on the device.
    """

    def one(i: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed + i) % _SEEDS)
        return torch.randn(size or network.n_parameters, generator=generator, dtype=network.dtype, device="cpu")

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
    flat = network.flatten(base) if isinstance(base, Mapping) else base
    if flat.shape != (n, network.n_parameters):
        msg = (
            f"The base distribution gave shape {tuple(flat.shape)}; "
            f"needed is ({n}, {network.n_parameters}): samples, parameters."
        )
        raise SettingsError(msg)
    return torch.cat([flat.detach().to("cpu", network.dtype), normal(network, seed, _SEEDS // 2 + start, PROBES)])


def lost(n: int, generator: torch.Generator) -> Tensor:
    """Stand in for the base distribution of a posterior that was loaded or copied: it cannot be drawn from again."""
    msg = "The posterior has a base distribution, which no file or copy holds: fit a new one to have more samples."
    raise SettingsError(msg)
