r"""A module seen as a function :math:`f(\theta, x)` of one flat vector, without touching the module.

The structure of the module is copied once and set to evaluation mode; its tensors are shared, not copied. The
user's module keeps its mode, its gradients and its attributes.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nullbayes.errors import InputError, ModelError, NullBayesError
from nullbayes.hashing import fingerprint
from nullbayes.jacobian.batches import described, leaves, map_leaves, n_examples, same_form, take_examples
from nullbayes.jacobian.modules import HALF, evaluation_copy, unwrapped
from nullbayes.jacobian.places import Places, tensors_of
from nullbayes.memory import is_out_of_memory
from nullbayes.precision import differentiable, plain_recurrence, uncompiled

OutputFn = Callable[[Any], Tensor]
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
    output_fn : callable, optional
        Takes the outputs out of what the model returns; by default its only tensor, or that called "logits".

    Notes
    -----
    A model in half precision is evaluated in float32, at the same values of its parameters.
    """

    def __init__(self, model: nn.Module, parameters: Selection = None, output_fn: OutputFn | None = None) -> None:
        if not isinstance(model, nn.Module):
            msg = f"model must be a torch.nn.Module, not {type(model).__name__}; nb.as_module makes one of a function."
            raise ModelError(msg)
        self.model = model = unwrapped(model)
        self.module = evaluation_copy(model)
        self.output_fn = output_fn or the_output
        switches = {
            plain_recurrence: any(isinstance(module, nn.RNNBase) for module in model.modules()),
            uncompiled: any(hasattr(module, "_orig_mod") for module in model.modules()),
        }
        self._switches = tuple(switch for switch, needed in switches.items() if needed)
        chosen = _select(model, parameters)
        self.names = tuple(chosen)
        self.shapes = tuple(tuple(p.shape) for p in chosen.values())
        self.sizes = tuple(p.numel() for p in chosen.values())
        _check_uniform(chosen)
        self.widened = any(t.dtype in HALF for t in tensors_of(model).values())  # to float32, for all that follows
        dtype = torch.float32 if self.widened else next(iter(chosen.values())).dtype
        self.theta = torch.cat([p.detach().reshape(-1).to(dtype) for p in chosen.values()])  # (P,)
        if not torch.isfinite(self.theta).all():
            bad = next(name for name, p in chosen.items() if not torch.isfinite(p).all())
            msg = f"Parameter {bad!r} holds NaN or Inf: the network cannot have been trained to this state."
            raise ModelError(msg)
        self._trained = {} if self.widened else self.unflatten(self.theta)
        for name, tensor in tensors_of(model).items():
            if name not in self._trained:
                self._trained[name] = tensor.detach().clone()
        self.n_parameters = len(self.theta)
        self.dtype, self.device = self.theta.dtype, self.theta.device
        self.lock = threading.RLock()  # parameters and hooks are put into the module for the time of a call
        self.forward_mode: bool | None = None  # whether forward mode gives the right derivatives; None: not compared
        self.trained_on = ""  # what its training inputs are like, once they are seen
        self.found: dict[Any, Any] = {}  # what was found out about the network, once for all

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copy makes anew; the module is copied while no other thread has its own tensors in it."""
        state = {key: value for key, value in vars(self).items() if key not in ("lock", "found")}
        if self.module is not self.model:
            with self.lock:
                memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_of(self.module).values()}
                state["module"] = copy.deepcopy(self.module, memo)
        return state

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

    def __call__(self, flat: Tensor, x: Any) -> Tensor:  # (P,) -> (n, ...)
        """Evaluate the network at the given parameters; outputs are (n, O), or what else the model puts out."""
        outputs = self.evaluate(x, lambda *inputs: functional_call(self.module, self.unflatten(flat), *inputs))
        return outputs.to(flat.dtype)  # a model may go on in another precision

    def evaluate(self, x: Any, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Tensor:  # (n, ...)
        """Return the outputs of a call of the module, ``run(args, kwargs)``, or say what is wrong with them."""
        args, kwargs = arguments(map_leaves(_widened if self.widened else torch.clone, x))  # who writes into it, may
        with self.lock, contextlib.ExitStack() as stack:
            for switch in self._switches:
                stack.enter_context(switch())
            try:
                returned = run(args, kwargs)
            except Exception as error:
                if not isinstance(error, NullBayesError) and not is_out_of_memory(error):
                    self._compare_with_training("failed on", x, error)
                raise
        outputs = self.output_fn(returned)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or outputs.ndim == 0:
            what = f"{outputs.dtype}, shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
            msg = f"The output must be a floating-point tensor with one entry an example, not {what}: see output_fn."
            raise ModelError(msg)
        if len(outputs) != (n := n_examples(x)):
            self._compare_with_training(f"gave {len(outputs)} answers to {n}", x)
        return outputs[:, None] if outputs.ndim == 1 else outputs

    def _compare_with_training(self, what: str, x: Any, error: Exception | None = None) -> None:
        """Say that inputs are not as they were in training, if so, where the network could do nothing with them."""
        now, own = described(x), str(self.dtype)
        if self.trained_on not in ("", now):
            msg = (
                f"The network {what} {now}; in training it had {self.trained_on} (n examples). Pass inputs of that "
                f"form{'' if now.count(',') == self.trained_on.count(',') else '; one example x alone as x[None]'}."
            )
            raise InputError(msg) from error  # a RuntimeError too: after one, another route is tried
        odd = next((leaf.dtype for leaf in leaves(x) if leaf.is_floating_point() and str(leaf.dtype) != own), None)
        if odd is not None and not self.widened:
            msg = (
                f"The network {what} {now}: its parameters are {own}, these numbers are {odd}. Convert the inputs, "
                f"x.to({own}), or the network."
            )
            raise InputError(msg) from error

    def check_form(self, x: Any) -> None:
        """Refuse inputs that have other parts than those of training: a mask that is missing changes the answer."""
        now = described(x)
        if self.trained_on and not same_form(now, self.trained_on):
            msg = (
                f"The network is given {now}; in training it had {self.trained_on} (n examples). Pass all of its "
                "inputs and no others, in that form: several as a tuple (a, b), named ones as a mapping."
            )
            raise InputError(msg)

    def output_shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of the outputs for one example of such inputs."""
        key = ("shape", *(tuple(leaf.shape[1:]) for leaf in leaves(x)))
        if key not in self.found:
            self.found[key] = tuple(self.outputs(take_examples(x, 0, 1)).shape[1:])
        shape: tuple[int, ...] = self.found[key]
        return shape

    def outputs(self, x: Any) -> Tensor:  # (n, ...)
        """Evaluate the network as it was trained."""
        with torch.no_grad(), differentiable():  # the same as for derivatives
            return self(self.theta, x)

    def check_unchanged(self) -> None:
        """Refuse to go on when the model's parameters are no longer those that the posterior was made for."""
        if self.module is self.model and any(module.training for module in self.model.modules()):
            msg = "The model could not be copied, so it must stay as it was fitted: call model.eval()."
            raise ModelError(msg)
        with self.lock:
            if "places" not in self.found:
                self.found["places"] = Places(self.model)
            current = self.found["places"].tensors()
        for name, old in self._trained.items():
            new = current.get(name)
            if new is None or (new.dtype, new.device) != (old.dtype, old.device) or not _same(new.detach(), old):
                msg = (
                    f"{name!r} of the model has changed since the posterior was made: "
                    "load the old parameters back, or make and fit a new posterior."
                )
                raise ModelError(msg)

    def fingerprint(self) -> str:
        """Return a hash of every parameter and buffer of the model as they are now: names, shapes and bytes."""
        return fingerprint(sorted(tensors_of(self.model).items()))


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors entry by entry; NaN, which a buffer may hold, is the same as NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))


def the_output(returned: Any) -> Tensor:  # (n, ...)
    """Return the tensor that a model means by its answer: the only one, or that called "logits"."""
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping) and isinstance(returned.get("logits"), Tensor):
        logits: Tensor = returned["logits"]
        return logits
    if isinstance(returned, (Mapping, tuple, list)):
        found = [leaf for leaf in leaves(returned) if leaf.is_floating_point()]
        if len(found) == 1:
            return found[0]
        names = f" ({', '.join(map(str, returned))})" if isinstance(returned, Mapping) else ""
        what = f"{type(returned).__name__} with {len(found)} floating-point tensors{names}"
    else:
        what = type(returned).__name__
    msg = f"The model returns a {what}: say which is its output with output_fn=lambda returned: returned[...]."
    raise ModelError(msg)


def _widened(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype in HALF else leaf.clone()


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a model takes an input: a tuple as several arguments, a mapping by name."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, tuple) else ((x,), {})


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
            raise ModelError(_no_match(pattern, list(everything)))
    return {n: p for n, p in everything.items() if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)}


def _no_match(pattern: str, names: list[str]) -> str:
    """Say what a pattern that matches nothing may have meant: all of a layer, or a name like it."""
    for longer in (f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"):
        if fnmatch.filter(names, longer):
            return f"parameters={pattern!r} is the name of no parameter: {longer!r} would match some."
    alike = difflib.get_close_matches(pattern, names, 8) or names[:8]
    more = ", ..." if len(names) > len(alike) else ""
    return f"parameters={pattern!r} matches none of {', '.join(alike)}{more}: pass a name of these, or a glob."


def _check_uniform(chosen: Mapping[str, Tensor]) -> None:
    for what, values in (
        ("devices", {str(p.device) for p in chosen.values()}),
        ("precisions", {"float32" if p.dtype in HALF else str(p.dtype)[6:] for p in chosen.values()}),
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
