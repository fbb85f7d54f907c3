"""Networks that change their own parameters in place when they are called, which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nullbayes.errors import ModelError, NullBayesError

_TABLES = (F.embedding, F.embedding_bag)
_WRITTEN = (
    "The network changes its parameter {!r} in place whenever it is called: for a trained network leave that out of "
    "forward, or compute a new tensor, such as weight.clamp(min=0.0) instead of weight.clamp_(min=0.0)."
)
_NO_VALUES = ("requires_grad_", "detach_", "share_memory_", "rename_")  # which end like operations that write
_ASSIGN: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class Writing(TorchFunctionMode):
    """Refuse, while a network is called, operations that change its parameters in place.

    Such a network is no function of its parameters, and has no derivatives with respect to what it writes.

    Parameters
    ----------
    named : mapping of Tensor
        The parameters by name, those that the call has instead of the module's own.

    Attributes
    ----------
    found : str
        The name of a parameter that was written with the values that it had; empty if there was none.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._named, self.found = [(name, p) for name, p in named.items() if p.numel()], ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, unless it changes a parameter."""
        kwargs = kwargs or {}
        if func in _TABLES:
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            normalized = kwargs.get("max_norm") is not None
            if normalized and (name := self._name(weight)):
                raise ModelError(
                    f"The network calls torch.nn.functional.{func.__name__} with max_norm, which changes {name!r} "
                    "whenever it is called: for a trained network leave max_norm out, and normalize the weights once."
                )
        if func == _ASSIGN and (name := self._name(args[0])) and _replaces(*args):
            raise ModelError(_WRITTEN.format(name))
        written = [(name, tensor) for tensor in _targets(func, args, kwargs) if (name := self._name(tensor))]
        before = [tensor.detach().clone() for _, tensor in written]
        result = func(*args, **kwargs)
        for (name, tensor), old in zip(written, before, strict=True):
            if not torch.equal(tensor.detach(), old):
                with torch.no_grad():
                    tensor.copy_(old)
                raise ModelError(_WRITTEN.format(name))
            self.found = name
        return result

    def explain(self, error: RuntimeError) -> None:
        """Say, after an error of autograd, which parameter the network has written, if it has."""
        if self.found and not isinstance(error, NullBayesError):
            raise ModelError(_WRITTEN.format(self.found)) from error

    def _name(self, tensor: Any) -> str:
        """Return the name of the parameter whose memory a tensor has; empty if it is no parameter's."""
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return ""
        for name, p in self._named:
            if p.data_ptr() <= tensor.data_ptr() < p.data_ptr() + p.numel() * p.element_size():
                return name
        return ""


def _replaces(tensor: Tensor, values: Tensor) -> bool:
    """Return whether ``tensor.data = values`` changes a parameter, now or while derivatives are taken.

    A parameter of the module itself, which does not vary, would keep what it was given then.
    """
    return isinstance(tensor, nn.Parameter) or not torch.equal(tensor.detach(), values.detach().to(tensor))


def _targets(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return what an operation writes: its first argument if its name says so, or each of a list, and ``out``."""
    called, targets = getattr(func, "__name__", ""), []
    writes = called.endswith("_") and not called.startswith("__") and called not in _NO_VALUES
    if args and (writes or called == "__setitem__"):
        targets.append(args[0])
    targets.append(kwargs.get("out"))
    return [part for target in targets for part in (target if isinstance(target, (list, tuple)) else [target])]
