"""Functions of a dictionary of parameters, as modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from nullbayes.errors import ModelError


def as_module(function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that calls a function of a dict of parameters.

    Parameters
    ----------
    function : callable (parameters, *inputs) -> outputs
        Takes the parameters as a dict with the names given here.
    parameters : mapping of floating-point tensors
        The trained values; shared, not copied. Names may have dots, like those of a module.

    Returns
    -------
    nn.Module
        What posteriors take as a model.

    Raises
    ------
    ModelError
        If a parameter is not a floating-point tensor, or a module cannot have its name.

    Examples
    --------
    >>> import torch
    >>> model = as_module(lambda p, x: x @ p["w"] + p["b"], {"w": torch.ones(3, 2), "b": torch.zeros(2)})
    >>> model(torch.ones(1, 3))
    tensor([[3., 3.]], grad_fn=<AddBackward0>)
    """
    if not callable(function) or not isinstance(parameters, Mapping) or not parameters:
        msg = "as_module takes a function (parameters, *inputs) -> outputs and a dict of its parameters by name."
        raise ModelError(msg)
    for name, value in parameters.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            msg = f"Parameter {name!r} must be a floating-point tensor: leave what does not vary to the function."
            raise ModelError(msg)
    try:
        return _FunctionModule(function, parameters)
    except (KeyError, AttributeError, TypeError) as error:
        msg = f"The names of the parameters cannot be those of a module's ({error}): choose others."
        raise ModelError(msg) from error


class _FunctionModule(nn.Module):
    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._function, self._names = function, tuple(parameters)
        for name, value in parameters.items():
            place: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(value.detach()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function({name: self.get_parameter_now(name) for name in self._names}, *args, **kwargs)

    def get_parameter_now(self, name: str) -> Tensor:
        """Return a parameter, or the tensor that replaces it during a call."""
        place: Any = self
        for part in name.split("."):
            place = getattr(place, part)
        found: Tensor = place
        return found
