"""Pieces of HTML: everything that comes from outside is escaped here."""

from __future__ import annotations

import html
import re


def escaped(text: object) -> str:
    """Return text in which nothing is mark-up, also within an attribute; characters that HTML forbids are left out."""
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "", str(text)))


def prose(text: str) -> str:
    """Return a paragraph's text, with what stands between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner stands for itself
        parts[-2:] = ["`".join(parts[-2:])]
    return "".join(f"<code>{escaped(part)}</code>" if i % 2 else escaped(part) for i, part in enumerate(parts))


def element(tag: str, content: str = "", **attributes: object) -> str:
    """Return an element around content that is mark-up already.

    Attributes are escaped; a trailing underscore is dropped (``class_``), others become hyphens. None leaves one out.
    """
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    written = "".join(f' {name}="{escaped(value)}"' for name, value in names.items())
    return f"<{tag}{written}>{content}</{tag}>"


def hidden(text: str) -> str:
    """Return text for those who listen to the page, which is not shown."""
    return f'<span class="hidden">{escaped(text)}</span>'
