"""Write a saved posterior again with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from nullbayes import io

Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the tensors and the header, in place


def rewritten(path: Path, change: Change) -> Path:
    """The same file with its tensors or its header changed, and the checksum that belongs to it."""
    tensors, header = io.read(path)
    change(tensors, header)
    save_file(tensors, path, metadata=io._metadata(json.dumps(header), tensors))
    return path
