r"""A module seen as a function :math:`f(\theta, x)` of one flat vector, without touching the module.

The structure of the module is copied once and set to evaluation mode; its tensors are shared, not copied. The
user's module keeps its mode, its gradients and its attributes.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from nullbayes.errors import ModelError
from nullbayes.jacobian.data import take_examples
from nullbayes.jacobian.fingerprint import fingerprint
from nullbayes.precision import full_precision

Selection = None | str | Iterable[str] | Callable[[str, nn.Parameter], bool]


class Network:
    """The function, and the flat vector of the parameters that may vary.

    Parameters
    ----------
    model : nn.Module
        Any differentiable module whose examples do not influence each other.
    parameters : None, str, iterable of str, or callable (name, parameter) -> bool
        Which parameters vary: all that require gradients, those whose names match a glob such as ``"head.*"``, or
        those for which the predicate holds.
    """

    def __init__(self, model: nn.Module, parameters: Selection = None) -> None:
        if not isinstance(model, nn.Module):
            msg = f"model must be a torch.nn.Module, not {type(model).__name__}."
            raise ModelError(msg)
        self.model = model
        self.module = _evaluation_copy(model)
        chosen = _select(model, parameters)
        self.names = tuple(chosen)
        self.shapes = tuple(tuple(p.shape) for p in chosen.values())
        self.sizes = tuple(p.numel() for p in chosen.values())
        _check_uniform(chosen)
        self.theta = torch.cat([p.detach().reshape(-1) for p in chosen.values()])  # (P,)
        if not torch.isfinite(self.theta).all():
            bad = next(name for name, p in chosen.items() if not torch.isfinite(p).all())
            msg = f"Parameter {bad!r} holds NaN or Inf: the network cannot have been trained to this state."
            raise ModelError(msg)
        self._fixed = {name: t.detach().clone() for name, t in _tensors(model).items() if name not in chosen}
        self.n_parameters = len(self.theta)
        self.dtype, self.device = self.theta.dtype, self.theta.device
        self.lock = threading.RLock()  # parameters and hooks are put into the module for the time of a call
        self.found: dict[str, Any] = {}  # what was found out about the network, once for all

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copy makes anew."""
        return {key: value for key, value in vars(self).items() if key not in ("lock", "found")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up the state of another."""
        vars(self).update(state, lock=threading.RLock(), found={})

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:  # (*, P) -> named (*, shape)
        """Name the pieces of a flat vector, or of a batch of them."""
        pieces = flat.split(self.sizes, dim=-1)
        return {
            name: piece.reshape((*flat.shape[:-1], *shape))
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:  # named (S, *shape) -> (S, P)
        """Lay named tensors, each with a leading sample dimension, into flat vectors."""
        missing = [name for name in self.names if name not in named]
        if missing:
            msg = f"The tensors lack {missing[0]!r}; needed are {', '.join(self.names)}."
            raise ModelError(msg)
        return torch.cat([named[name].reshape(len(named[name]), -1) for name in self.names], dim=1)

    def __call__(self, flat: Tensor, x: Any) -> Tensor:  # (P,) -> (n, O)
        """Evaluate the network at the given parameters; outputs are (n, O)."""
        args, kwargs = _arguments(x)
        with self.lock:
            return as_matrix(functional_call(self.module, self.unflatten(flat), args, kwargs))

    def outputs(self, x: Any) -> Tensor:  # (n, O)
        """Evaluate the network as it was trained."""
        with torch.no_grad(), full_precision():
            return self(self.theta, x)

    def check_examples(self, x: Any) -> Tensor:
        """Refuse a network whose answer is random or depends on the other examples; return its outputs (n, O)."""
        outputs, again = self.outputs(x), self.outputs(x)
        if not torch.isfinite(outputs).all():
            msg = "The network answers NaN or Inf on the training data."
            raise ModelError(msg)
        scale = float(outputs.abs().max()) + torch.finfo(outputs.dtype).tiny
        allowed = 1e3 * torch.finfo(outputs.dtype).eps ** 0.75 * scale
        if float((outputs - again).abs().max()) > allowed:
            msg = (
                "The network answers differently when asked twice, even in evaluation mode: something in it is random "
                "(dropout called with training=True?). Make it deterministic in eval mode."
            )
            raise ModelError(msg)
        if len(outputs) > 1:
            alone = self.outputs(take_examples(x, 0, 1))
            if float((alone - outputs[:1]).abs().max()) > allowed:
                msg = (
                    "The answer for an example depends on the other examples in its batch (normalization by batch "
                    "statistics?). Each row must belong to one example: use running statistics, GroupNorm or LayerNorm."
                )
                raise ModelError(msg)
        return outputs

    def check_unchanged(self) -> None:
        """Refuse to go on when the model's parameters are no longer those that the posterior was made for."""
        current = _tensors(self.model)
        for name, old in {**self.unflatten(self.theta), **self._fixed}.items():
            new = current.get(name)
            if new is None or not _same(new.detach().to(old.device), old):
                msg = (
                    f"{name!r} of the model has changed since the posterior was made: "
                    "load the old parameters back, or make and fit a new posterior."
                )
                raise ModelError(msg)

    def fingerprint(self) -> str:
        """Return a hash of every parameter and buffer of the model as they are now: names, shapes and bytes."""
        return fingerprint(sorted(_tensors(self.model).items()))


_kernels_lock = threading.Lock()
_kernels_users: list[contextlib.ExitStack] = []  # the first of them holds the switches, which are the whole process's


@contextlib.contextmanager
def differentiable_kernels() -> Iterator[None]:
    """Take, for a while, kernels that can be differentiated as they are, and full precision.

    The fused attention kernels know neither forward mode nor ``vmap``.
    """
    with _kernels_lock:
        switches = _kernels_users[0] if _kernels_users else contextlib.ExitStack()
        if not _kernels_users:
            switches.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            switches.enter_context(sdpa_kernel(SDPBackend.MATH))
        _kernels_users.append(switches)
    try:
        with full_precision():
            yield
    finally:
        with _kernels_lock:
            _kernels_users.pop()
            if not _kernels_users:
                switches.close()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name: what the outputs depend on beside the inputs."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors entry by entry; NaN, which a buffer may hold, is the same as NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))


def as_matrix(outputs: Any) -> Tensor:  # (n,) or (n, O) -> (n, O)
    """Return outputs as a matrix, one row an example."""
    if not isinstance(outputs, Tensor):
        msg = (
            f"The model returns {type(outputs).__name__}; "
            "wrap it in a module that returns one tensor (examples, outputs)."
        )
        raise ModelError(msg)
    if outputs.ndim == 1:
        return outputs[:, None]
    if outputs.ndim != 2:
        msg = (
            f"The model returns shape {tuple(outputs.shape)}; needed is (examples, outputs). Wrap it in a module that "
            "flattens or pools the rest."
        )
        raise ModelError(msg)
    return outputs


def _arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, tuple) else ((x,), {})


def _evaluation_copy(model: nn.Module) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()]
    try:
        module = copy.deepcopy(model, {id(t): t for t in tensors})
    except Exception as error:
        if any(m.training for m in model.modules()):
            msg = f"The model is in training mode and cannot be copied ({error}): call model.eval() first."
            raise ModelError(msg) from error
        module = model
    else:
        module.eval()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            msg = (
                f"Layer {name!r} normalizes by the statistics of the batch (track_running_stats=False), so examples "
                "influence each other: train it with running statistics, or use GroupNorm."
            )
            raise ModelError(msg)
    return module


def _select(model: nn.Module, parameters: Selection) -> dict[str, nn.Parameter]:
    everything = dict(model.named_parameters())
    trainable = {name: p for name, p in everything.items() if p.requires_grad}
    if parameters is None:
        if not trainable:
            msg = "No parameter of the model requires gradients: set requires_grad_(True) on those that may vary."
            raise ModelError(msg)
        return trainable
    if callable(parameters):
        chosen = {name: p for name, p in everything.items() if parameters(name, p)}
        if not chosen:
            msg = "parameters=... holds for no parameter of the model."
            raise ModelError(msg)
        return chosen
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        msg = (
            f"parameters=... takes names or globs, such as {list(everything)[-1]!r}, or a predicate, "
            f"not {str(parameters)[:60]}."
        )
        raise ModelError(msg)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in everything):
            msg = f"parameters={pattern!r} matches none of {', '.join(list(everything)[:8])}, ..."
            raise ModelError(msg)
    return {n: p for n, p in everything.items() if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)}


def _check_uniform(chosen: Mapping[str, Tensor]) -> None:
    for what, values in (
        ("devices", {str(p.device) for p in chosen.values()}),
        ("precisions", {str(p.dtype) for p in chosen.values()}),
    ):
        if len(values) > 1:
            msg = (
                f"The parameters lie on several {what} ({', '.join(sorted(values))}): "
                "move the model to one, or restrict parameters=... to one."
            )
            raise ModelError(msg)
    if not all(p.is_floating_point() for p in chosen.values()):
        msg = "Only floating-point parameters can vary: restrict parameters=... to those."
        raise ModelError(msg)
