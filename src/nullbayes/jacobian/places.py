"""Where the tensors of a module lie: to look at all of them often, without walking through the module each time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name: what the outputs depend on beside the inputs."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Places:
    """The dictionaries in which a module and its parts hold their tensors.

    Parameters
    ----------
    model : nn.Module
        The module. Parts that are exchanged for others are noticed, and the module is walked through again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._walk()

    def tensors(self) -> dict[str, Tensor | None]:
        """Return every parameter and buffer by name, as it is now."""
        if any(len(parts) != n for parts, n in self._sizes) or any(
            parts.get(key) is not part for parts, key, part in self._parts
        ):
            self._walk()
        return {name: own.get(key) for name, own, key in self._held}

    def _walk(self) -> None:
        modules: dict[str, Any] = dict(self.model.named_modules(remove_duplicate=False))
        self._sizes = [(part._modules, len(part._modules)) for part in modules.values()]
        self._parts = [(part._modules, key, child) for part in modules.values() for key, child in part._modules.items()]
        self._held = []
        for name in tensors_of(self.model):
            where, _, key = name.rpartition(".")
            own = modules[where]
            self._held.append((name, own._parameters if key in own._parameters else own._buffers, key))
