"""Pictures: bytes as PNG within the page, and galleries of them."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from nullbayes.page.document import Gallery, Picture
from nullbayes.page.markup import element, escaped, prose

_SHOWN = 112  # pixels: about as wide is a small picture shown
_SMALL = 64  # pixels: up to here a picture is enlarged with its pixels as squares


def png(image: Sequence[Any]) -> bytes:
    """Return an image of bytes, (H, W) grey or (H, W, 3) red, green and blue, as a PNG file.

    Rows of different lengths are refused, and what is not a whole number from 0 to 255.
    """
    height, width, channels = _shape(image)
    lines = []
    for row in image:
        values = [value for pixel in row for value in pixel] if channels == 3 else row
        try:
            line = bytes([int(value) for value in values])
        except (TypeError, ValueError) as error:
            raise ValueError("A picture must hold whole numbers from 0 to 255.") from error
        if len(row) != width or len(line) != width * channels:
            raise ValueError(f"All rows of a picture must have {width} pixels of {channels} numbers.")
        lines.append(b"\0" + line)  # each line begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(b"".join(lines), 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _shape(image: Sequence[Any]) -> tuple[int, int, int]:
    height, width = len(image), len(image[0]) if len(image) else 0
    if not height or not width:
        raise ValueError("A picture must have at least one pixel.")
    return height, width, 3 if hasattr(image[0][0], "__len__") else 1


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def render_gallery(gallery: Gallery, number: int) -> str:
    """Return pictures side by side as HTML; an input that is no image is shown as a quotation."""
    tiles = "".join(_tile(picture) for picture in gallery.pictures)
    has_text = any(len(picture.image) == 0 for picture in gallery.pictures)
    style = None if gallery.columns is None else f"--n:{max(1, int(gallery.columns))}"
    content = (
        element("ul", tiles, class_="gallery texts" if has_text else "gallery", style=style) if tiles else _NOTHING
    )
    caption = f"<figcaption><b>Figure {number}.</b> {prose(gallery.caption)}</figcaption>"
    return element("figure", content + caption, class_="wide", id=f"figure-{number}")


_NOTHING = '<p class="nothing">There are no inputs to show.</p>'


def _tile(picture: Picture) -> str:
    if len(picture.image) == 0:
        quoted = element("blockquote", escaped(picture.text or picture.label))
        label = f'<p class="label">{escaped(picture.label)}</p>' if picture.text and picture.label else ""
        return element("li", quoted + label)
    data = base64.b64encode(png(picture.image)).decode("ascii")
    height, width = len(picture.image), len(picture.image[0])
    times = max(1, round(_SHOWN / max(width, 1)))
    drawn = (
        f'<img src="data:image/png;base64,{data}" alt="{escaped(picture.alt or picture.label or "picture")}"'
        f' width="{width * times}" height="{height * times}"{" class=pixels" if max(height, width) <= _SMALL else ""}>'
    )
    text = element("blockquote", escaped(picture.text)) if picture.text else ""
    return element("li", f'{drawn}{text}<p class="label">{escaped(picture.label)}</p>')
