"""Shifted images: rotations, fog and Gaussian blur, in torch and the same at every call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, interpolate, pad

FOG = (0.0, 0.2, 0.5, 0.75, 1.0, 1.5)  # how much of it, for strengths 0 to 5
BLUR = (0.0, 0.4, 0.6, 0.7, 0.8, 1.0)  # standard deviations in pixels of images of 32 by 32
_OCTAVES = (2, 4, 8, 16)  # cells of a side from which fog is made
_ROUGHNESS = 0.6  # weight of each octave relative to the one before


@dataclass(frozen=True)
class Shift:
    """A change of images that grows with its strength; strength 0 changes nothing.

    Attributes
    ----------
    name, unit : str
        What it is, and what the strength counts.
    strengths : tuple of float
        From 0 on.
    apply : callable (images, strength) -> images
        The change.
    """

    name: str
    unit: str
    strengths: tuple[float, ...]
    apply: Callable[[Tensor, float], Tensor]


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Return square images (n, c, h, w) turned counterclockwise about their center, with zeros where nothing was."""
    if degrees == 0:
        return x
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], dtype=x.dtype, device=x.device)
    grid = affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def fogged(x: Tensor, strength: float) -> Tensor:
    """Return images (n, c, h, w) between 0 and 1 behind a cloudy haze; ``strength`` is an index of `FOG`.

    Clouds are a sum of smooth noise of several sizes, scaled to [0, 1] for each image; image ``i`` has the same clouds
    at every strength. Image and clouds are added and scaled back to the brightness of the image.
    """
    amount = FOG[int(strength)]
    if amount == 0:
        return x
    clouds = _clouds(len(x), x.shape[-2:]).to(x)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return ((x + amount * clouds) * brightest / (brightest + amount).clamp_min(1e-12)).clamp(0.0, 1.0)


def blurred(x: Tensor, strength: float) -> Tensor:
    """Return images (n, c, h, w) convolved with a Gaussian, mirrored at borders; ``strength`` is an index of `BLUR`."""
    sigma = BLUR[int(strength)]
    if sigma == 0:
        return x
    reach = math.ceil(4 * sigma)
    steps = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    weights = (weights / weights.sum()).expand(x.shape[1], 1, -1)
    wide = pad(x, (reach, reach, reach, reach), mode="reflect")
    return conv2d(conv2d(wide, weights[..., None, :], groups=x.shape[1]), weights[..., None], groups=x.shape[1])


def rotations(angles: tuple[float, ...]) -> Shift:
    """Return rotations by the angles, in degrees."""
    return Shift("rotation", "degrees", angles, rotated)


def corruptions(mean: tuple[float, ...], std: tuple[float, ...], strengths: int = 5) -> tuple[Shift, ...]:
    """Return fog and Gaussian blur of images that were normalized with a mean and spread per channel."""
    steps = tuple(float(strength) for strength in range(strengths + 1))

    def within(change: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
        def apply(x: Tensor, strength: float) -> Tensor:
            if strength == 0:
                return x
            center, spread = (torch.tensor(values).to(x)[:, None, None] for values in (mean, std))
            return (change((x * spread + center).clamp(0.0, 1.0), strength) - center) / spread

        return apply

    return (
        Shift("fog", "strength", steps, within(fogged)),
        Shift("Gaussian blur", "strength", steps, within(blurred)),
    )


def _clouds(n: int, size: torch.Size) -> Tensor:
    """Return smooth noise (n, 1, h, w) between 0 and 1, the same at every call."""
    generator, total = torch.Generator("cpu").manual_seed(0), torch.zeros(n, 1, *size, device="cpu")
    for i, cells in enumerate(_OCTAVES):
        noise = torch.rand(n, 1, cells, cells, generator=generator, device="cpu")
        total += _ROUGHNESS**i * interpolate(noise, size=tuple(size), mode="bicubic", align_corners=True)
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    return (total - low) / (high - low).clamp_min(1e-12)
