"""Jacobians and Gauss-Newton matrices of the small networks, one call of autograd per entry, to compare with.

Nothing here uses the library.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from support.models import Task, call


def varying(model: nn.Module) -> list[str]:
    """The names of the parameters that vary unless one chooses."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def flat_parameters(model: nn.Module, names: Iterable[str] | None = None) -> Tensor:  # (P,)
    everything = dict(model.named_parameters())
    return torch.cat([everything[name].detach().flatten() for name in names or varying(model)])


def with_parameters(model: nn.Module, flat: Tensor, names: Iterable[str] | None = None) -> nn.Module:
    """A copy of the model, in evaluation mode, with the parameters of a flat vector."""
    names = list(names or varying(model))
    result = copy.deepcopy(model).eval()
    everything, start = dict(result.named_parameters()), 0
    for name in names:
        parameter = everything[name]
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape).clone()
        start += parameter.numel()
    assert start == len(flat)
    return result


def jacobian(model: nn.Module, x: Any, names: Iterable[str] | None = None) -> Tensor:  # (n, O, P)
    """The derivatives of every output of every example, one call of autograd each."""
    return _gradients(model, names, lambda copied: call(copied, x))


def loss_jacobian(model: nn.Module, x: Any, y: Tensor, task: Task) -> Tensor:  # (n, P)
    """The gradient of the loss of every example, one call of autograd each."""

    def losses(copied: nn.Module) -> Tensor:
        outputs = call(copied, x)
        return torch.stack([task.loss(outputs[i], y[i]) for i in range(len(y))])[:, None]

    return _gradients(model, None, losses)[:, 0]


def _gradients(model: nn.Module, names: Iterable[str] | None, function: Callable[[nn.Module], Tensor]) -> Tensor:
    names = list(names or varying(model))
    copied = copy.deepcopy(model).eval()
    parameters = [dict(copied.named_parameters())[name].requires_grad_() for name in names]
    values = function(copied)
    rows = [
        torch.cat([
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(
                parameters, torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True), strict=True
            )
        ])
        for value in values.flatten()
    ]  # fmt: skip
    return torch.stack(rows).view(*values.shape, -1)


def gauss_newton(model: nn.Module, x: Any, y: Tensor, task: Task) -> Tensor:  # (P, P)
    r"""The sum of J^T H J over the examples, with H the Hessian of the loss in the outputs."""
    rows, outputs = jacobian(model, x), call(copy.deepcopy(model).eval(), x).detach()
    hessians = [torch.autograd.functional.hessian(lambda f, i=i: task.loss(f, y[i]), outputs[i]) for i in range(len(y))]
    return sum(j.T @ h @ j for j, h in zip(rows, hessians, strict=True))
