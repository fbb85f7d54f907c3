"""Posterior files to damage: a small good one, and ways to write it again with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import nullbayes as nb
from models import CLASSIFICATION, MLP, Task
from nullbayes import io

EXACT = nb.projectors.ExactDual()
X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))

Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the tensors and the header, in place


def fit(kind: type = nb.ProjectedPosterior, task: Task = CLASSIFICATION, n_samples: int = 4, **settings: Any) -> Any:
    options = {"projector": EXACT, "progress": False, "generator": torch.Generator().manual_seed(0), **settings}
    model = MLP.build(task.outputs)
    return kind(model, task.likelihood, prior_precision="optimal").fit([task.data()], n_samples, **options)


def rewritten(path: Path, change: Change) -> Path:
    """The same file with its tensors or its header changed, and the checksum that belongs to it."""
    tensors, header = io.read(path)
    change(tensors, header)
    save_file(tensors, path, metadata=io._metadata(json.dumps(header), tensors))
    return path
