"""Pictures and figures in few bytes of JSON, and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from nullbayes.page import Gallery, Picture

_DIGITS = 5


def rounded(value: Any) -> Any:
    """Return what JSON holds with floats of five digits behind the point."""
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def packed_gallery(made: Gallery) -> dict[str, Any]:
    """Return a gallery as JSON holds it, with the bytes of its images in base64."""
    return {"caption": made.caption, "pictures": [_packed(picture) for picture in made.pictures]}


def unpacked_gallery(found: Mapping[str, Any]) -> Gallery:
    """Return the gallery that was packed."""
    return Gallery(found["caption"], [_unpacked(picture) for picture in found["pictures"]])


def _packed(picture: Picture) -> dict[str, Any]:
    pixels = np.asarray(picture.image, dtype=np.uint8)
    data = base64.b64encode(pixels.tobytes()).decode("ascii")
    return {
        "shape": list(pixels.shape),
        "bytes": data,
        "label": picture.label,
        "alt": picture.alt,
        "text": picture.text,
    }


def _unpacked(found: Mapping[str, Any]) -> Picture:
    pixels = np.frombuffer(base64.b64decode(found["bytes"]), dtype=np.uint8).reshape(found["shape"])
    return Picture(pixels.tolist(), found["label"], found["alt"], found["text"])
