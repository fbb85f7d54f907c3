"""Weights of a user's model, from a file of torch or of safetensors. No file is trusted to run code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nullbayes.command.frame import Console, Refusal

_INSIDE = ("state_dict", "model_state_dict", "model")  # where training scripts keep it
_MORE = (
    "{} holds more than tensors, which nullbayes does not unpickle: save the weights alone, "
    "torch.save(model.state_dict(), path)."
)
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and of torch.compile


def load_weights(model: nn.Module, path: Path, console: Console) -> None:
    """Put the weights of a file into a model, in place; refuse those that do not fit.

    The file is a state dictionary that ``torch.save`` wrote, or ends with ".safetensors". The console is told where the
    weights were found, if that was not at the top.
    """
    if not path.is_file():
        msg = f"There is no file {path} with weights."
        raise Refusal(msg)
    found = _state(_read(path), path, console)
    problems = _problems(model.state_dict(), found)
    if problems:
        msg = f"The weights of {path} do not fit the model: {'; '.join(problems)}."
        raise Refusal(msg)
    model.load_state_dict(found)


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        msg = f"{path} cannot be read as weights: save them with torch.save(model.state_dict(), path)."
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):  # a file of torch, then
            msg = _MORE.format(path)
        raise Refusal(msg) from error


def _state(found: Any, path: Path, console: Console) -> dict[str, Tensor]:
    """Return the tensors by name, from where they lie in a checkpoint, without the prefixes of wrappers."""
    for key in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            console.say(f'The weights are under "{key}" in {path}.')
            break
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        msg = f"{path} holds no weights by name: save them with torch.save(model.state_dict(), path)."
        raise Refusal(msg)
    state = {str(name): value for name, value in found.items()}
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
            console.say(f'The names of the weights in {path} begin with "{prefix}", which is left out.')
    return state


def _problems(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Return in words what of a state does not fit a model."""
    missing, unknown = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    shapes = [
        f"{name} is {tuple(found[name].shape)} instead of {tuple(value.shape)}"
        for name, value in wanted.items()
        if name in found and found[name].shape != value.shape
    ]
    problems = [f"missing are {_some(missing)}"] if missing else []
    problems += [f"unknown are {_some(unknown)}"] if unknown else []
    return problems + ([_some(shapes)] if shapes else [])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
