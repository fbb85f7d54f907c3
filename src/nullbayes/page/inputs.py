"""Pictures of inputs, with what is said of each: images become bytes, other inputs are described in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nullbayes.page.document import Gallery, Picture

_SMALLEST = 4  # pixels of a side; fewer are a table
_LARGEST = 96  # pixels of a side that are shown
_NUMBERS = 4  # of an input that is no image


def gallery(caption: str, inputs: Sequence[Any], labels: Sequence[str]) -> Gallery:
    """Return pictures of inputs side by side.

    Parameters
    ----------
    caption : str
        What they have in common.
    inputs : sequence
        One input each, without a batch dimension: tensors (H, W), (1, H, W) or (3, H, W) become images, on one scale
        of brightness; of others the first numbers are named.
    labels : sequence of str
        What is said of each.

    Returns
    -------
    Gallery
        Which JSON can hold, by ``dataclasses.asdict``.
    """
    images = [_image(x) for x in inputs]
    shown = [image for image in images if image is not None]
    low = min((float(image.min()) for image in shown), default=0.0)
    high = max((float(image.max()) for image in shown), default=1.0)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    pictures = []
    for x, image, label in zip(inputs, images, labels, strict=True):
        if image is None:
            words = _words(x)
            pictures.append(Picture((), f"{words}: {label}" if words else label, f"An input. {label}"))
        else:
            scaled = ((image - low) / max(high - low, 1e-12) * 255.0).round().clamp(0, 255).to(torch.uint8)
            pictures.append(Picture(scaled.tolist(), label, f"An input as an image. {label}"))
    return Gallery(caption, pictures)


def _image(x: Any) -> Tensor | None:  # (H, W) or (H, W, 3)
    """Return the pixels of an input that is an image, with fewer of them if there are many; None if it is none."""
    if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.is_complex() or min(x.shape[-2:]) < _SMALLEST:
        return None
    if x.ndim == 3 and x.shape[0] not in (1, 3):
        return None
    step = -(-max(x.shape[-2:]) // _LARGEST)
    pixels = torch.nan_to_num(x.detach().cpu().double())[..., ::step, ::step]
    if pixels.ndim == 2:
        return pixels
    return pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)


def _words(x: Any) -> str:
    """Return the first numbers of an input, or the input itself if it is a text."""
    if isinstance(x, str):
        return x
    if not isinstance(x, Tensor) or not x.numel():
        return ""
    numbers = [f"{value:.3g}" for value in x.detach().cpu().flatten()[: _NUMBERS + 1].tolist()]
    return f"({', '.join(numbers[:_NUMBERS])}{', …' if len(numbers) > _NUMBERS else ''})"
