r"""A module as a function :math:`f(\theta, x)` of one flat vector of parameters.

The structure of the module is copied once and set to evaluation mode; its tensors are shared, not copied. The
user's module keeps its mode, its gradients and its attributes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from nullbayes.distributed import ALONE, Group
from nullbayes.errors import InputError, ModelError, NullBayesError, SettingsError
from nullbayes.hashing import fingerprint
from nullbayes.jacobian.batches import described, form, leaves, map_leaves, n_examples, same_form, take_examples
from nullbayes.jacobian.division import Division
from nullbayes.jacobian.modules import (
    HALF,
    Places,
    evaluation_copy,
    lines_checked,
    select_parameters,
    tensors_of,
    unwrapped,
)
from nullbayes.jacobian.modules import Selection as Selection
from nullbayes.limits import is_out_of_memory
from nullbayes.precision import (
    WithoutAutocast,
    computed_parametrizations,
    differentiable,
    plain_recurrence,
    uncompiled,
)
from nullbayes.torch_internals import before_compilation

OutputFn = Callable[[Any], Tensor]
_ALONE = "one example x alone as x[None], and a list of examples as torch.stack(list)"


class RowFunction(Protocol):
    """What the rows are the derivatives of: one output of the network, or its loss, for each row."""

    def __call__(self, flat: Tensor, x: Any, y: Tensor) -> Tensor:  # (P,) -> (n, O)
        """Evaluate at flat parameters on some examples."""


class Network:
    """A network as a function of the flat vector of the parameters that vary.

    Parameters
    ----------
    model : nn.Module
        Any differentiable module whose examples do not influence each other. One in half precision is evaluated in
        float32, at the same values of its parameters.
    parameters : None, str, iterable of str, or callable (name, parameter) -> bool
        Which parameters vary: all that require gradients, those whose names match a glob such as ``"head.*"``, or
        those for which the predicate holds. A tied parameter matches a glob by any of its names; a predicate gets the
        first of them.
    output_fn : callable, optional
        Takes the outputs out of what the model returns; by default its only tensor, or the one called "logits".
    """

    _whole: Network | None = None  # of which this is a part
    _autocasts: bool | None = None  # whether the model turns autocast on by itself, once it was called
    division: Division | None = None  # of the parameters among processes, of which this has a part

    def __init__(self, model: nn.Module, parameters: Selection = None, output_fn: OutputFn | None = None) -> None:
        if not isinstance(model, nn.Module):
            msg = f"model must be a torch.nn.Module, not {type(model).__name__}; nb.as_module makes one of a function."
            raise ModelError(msg)
        self.model = model = unwrapped(model)
        self.module = evaluation_copy(model)
        self.output_fn = output_fn or the_output
        self._switches = []
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self._switches.append(plain_recurrence)
        if any(before_compilation(module) is not None for module in model.modules()):
            self._switches.append(uncompiled)
        if any(is_parametrized(module) for module in model.modules()):
            self._switches.append(computed_parametrizations)
        chosen = select_parameters(model, parameters)
        self.names = tuple(chosen)
        self.shapes = tuple(tuple(p.shape) for p in chosen.values())
        self.sizes = tuple(p.numel() for p in chosen.values())
        self.casts_to_float32 = any(t.dtype in HALF for t in tensors_of(model).values())
        dtype = torch.float32 if self.casts_to_float32 else next(iter(chosen.values())).dtype
        self.theta = torch.cat([p.detach().reshape(-1).to(dtype) for p in chosen.values()])  # (P,)
        self._trained = {} if self.casts_to_float32 else self.unflatten(self.theta)
        for name, tensor in tensors_of(model).items():
            if name not in self._trained:
                self._trained[name] = tensor.detach().clone()
        self.n_parameters = len(self.theta)
        self.dtype, self.device = self.theta.dtype, self.theta.device
        self.lock = threading.RLock()  # held while parameters or hooks are put into the module for a call
        self.input_signature = ""  # describes the training inputs, once they are seen
        self.returns_numbers = False  # whether the model returned one number per input, (n,), when it was last called
        self.forward_mode: bool | None = None  # whether it gives the right derivatives, once that was compared
        self.cache: dict[Any, Any] = {}  # what can be computed again: shapes, row builders, places of tensors

    def __getstate__(self) -> dict[str, Any]:
        """Leave out lock and cache; the module is copied while no other thread has put tensors into it."""
        state = {key: value for key, value in vars(self).items() if key not in ("lock", "cache")}
        if self.module is not self.model:
            with self.lock:
                memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_of(self.module).values()}
                state["module"] = copy.deepcopy(self.module, memo)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, with a lock and a cache of its own."""
        vars(self).update(state, lock=threading.RLock(), cache={})

    def part(self, division: Division) -> Network:
        """Return the same function of the parameters that one process has in a division; all others stay fixed.

        It shares the module and its lock, so that hooks see the calls of both.
        """
        first, last = division.tensors
        other = object.__new__(Network)
        vars(other).update(vars(self), cache={})
        other.names, other.shapes = self.names[first:last], self.shapes[first:last]
        other.sizes = self.sizes[first:last]
        other.theta, other.n_parameters = self.theta[division.columns], sum(other.sizes)
        other._whole, other.division, other.forward_mode = self, division, None
        return other

    @property
    def whole(self) -> Network:
        """The network as a function of all parameters that vary, also of those that other processes have."""
        return self._whole or self

    @property
    def group(self) -> Group:
        """The processes that divide the parameters among them: this one alone, unless this is a :meth:`part`."""
        return ALONE if self.division is None else self.division.group

    def check_whole(self) -> None:
        """Refuse to copy or export a posterior if other processes have a part of its parameters."""
        if self.division is not None:
            msg = (
                "Other processes have a part of this posterior's parameters: call posterior.save(path) in all of them, "
                "and nb.load(path, model) for one that has all parameters."
            )
            raise SettingsError(msg)

    def own_columns(self, flat: Tensor) -> Tensor:  # (*, all P) -> (*, P)
        """Return the part of flat vectors that belongs to the parameters of this process."""
        return flat if self.division is None else flat[..., self.division.columns]

    def all_columns(self, flat: Tensor) -> Tensor:  # (*, P) -> (*, all P)
        """Return flat vectors of all parameters, of which each process has a part."""
        return self.group.join(flat, dim=-1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:  # (*, P) -> named (*, shape)
        """Split a flat vector, or a batch of them, into named parameters."""
        pieces = flat.split(self.sizes, dim=-1)
        return {
            name: piece.reshape((*flat.shape[:-1], *shape))
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:  # named (S, *shape) -> (S, P)
        """Join named tensors, each with a leading sample dimension, into flat vectors."""
        missing = [name for name in self.names if name not in named]
        if missing:
            msg = f"The tensors lack {missing[0]!r}; needed are {', '.join(self.names)}."
            raise ModelError(msg)
        return torch.cat([named[name].reshape(len(named[name]), -1) for name in self.names], dim=1)

    def __call__(self, flat: Tensor, x: Any) -> Tensor:  # (P,) -> (n, ...)
        """Evaluate the network at the given parameters; the outputs have the shape that the model gives them."""
        outputs = self.evaluate(x, lambda *inputs: functional_call(self.module, self.unflatten(flat), *inputs))
        return outputs.to(flat.dtype)  # a model may compute in another precision

    def evaluate(self, x: Any, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Tensor:  # (n, ...)
        """Return the outputs of a call of the module, ``run(args, kwargs)``, or say what is wrong with them.

        The inputs are cloned, because some models modify them in place. Autocast within the model is off, as outside.
        """
        copied = _single if self.casts_to_float32 else torch.clone
        args, kwargs = arguments(map_leaves(copied, x))
        with self.lock, contextlib.ExitStack() as stack:
            for switch in self._switches:
                stack.enter_context(switch())
            watch = WithoutAutocast(self.device.type)
            if self._autocasts is not False:
                stack.enter_context(watch)
            try:
                returned = run(args, kwargs)
            except Exception as error:
                if not isinstance(error, NullBayesError) and not is_out_of_memory(error):
                    self._compare_with_training("failed on", x, error)
                if isinstance(error, IndexError):
                    with lines_checked(self.module):
                        run(*arguments(map_leaves(copied, x)))
                raise
            self._autocasts = self._autocasts or watch.seen
        outputs = self.output_fn(returned)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or outputs.ndim == 0:
            what = f"{outputs.dtype}, shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
            msg = f"The output must be a floating-point tensor with one entry per example, not {what}: see output_fn."
            if isinstance(outputs, Tensor) and outputs.ndim == 0 and n_examples(x) == 1:
                msg += (
                    " If the network ends in squeeze(), it takes the dimension of one example away: write squeeze(-1)."
                )
            raise ModelError(msg)
        if len(outputs) != (n := n_examples(x)):
            self._compare_with_training(f"gave {len(outputs)} answers to {n}", x)
        self.returns_numbers = outputs.ndim == 1
        return outputs[:, None] if self.returns_numbers else outputs

    def as_returned(self, outputs: Tensor) -> Tensor:  # (..., n, 1) -> (..., n)
        """Return outputs, or what belongs to each of them, in the shape in which the model returns its outputs."""
        return outputs.squeeze(-1) if self.returns_numbers or self.whole.returns_numbers else outputs

    def _compare_with_training(self, what: str, x: Any, error: Exception | None = None) -> None:
        """Raise an error that describes the training inputs, if these inputs differ from them."""
        now, trained, own = described(x), form(self.input_signature), str(self.dtype)
        if trained not in ("", now):
            hint = f"; {_ALONE}" if described(_alone(x)) == trained else ""
            msg = (
                f"The network {what} {now}; in training it had {trained} (n examples). Pass inputs of that form{hint}."
            )
            raise InputError(msg) from error  # also a RuntimeError, after which another route is tried
        odd = next((leaf.dtype for leaf in leaves(x) if leaf.is_floating_point() and str(leaf.dtype) != own), None)
        if odd is not None and not self.casts_to_float32:
            msg = (
                f"The network {what} {now}: its parameters are {own}, these numbers are {odd}. Convert the inputs, "
                f"x.to({own}), or the network."
            )
            raise InputError(msg) from error

    def check_form(self, x: Any) -> None:
        """Refuse inputs that have other parts than the training inputs: a missing mask would change the answer."""
        now, trained = described(x), form(self.input_signature)
        if now != trained and described(_alone(x)) == trained:  # which some networks take for several examples
            msg = f"The network is given {now}; in training it had {trained} (n examples). Pass {_ALONE}."
            raise InputError(msg)
        if trained and not same_form(now, trained):
            msg = (
                f"The network is given {now}; in training it had {trained} (n examples). Pass all of its "
                "inputs and no others, in that form: several as a tuple (a, b), named ones as a mapping."
            )
            raise InputError(msg)

    def output_shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of the outputs for one example of such inputs."""
        key = ("shape", *(tuple(leaf.shape[1:]) for leaf in leaves(x)))
        if key not in self.cache:
            self.cache[key] = tuple(self.outputs(take_examples(x, 0, 1)).shape[1:])
        shape: tuple[int, ...] = self.cache[key]
        return shape

    def outputs(self, x: Any) -> Tensor:  # (n, ...)
        """Evaluate the network at its trained parameters."""
        whole = self.whole  # so that all processes get the same bits
        with torch.no_grad(), differentiable():  # as for derivatives
            return whole(whole.theta, x)

    def check_unchanged(self) -> None:
        """Refuse a model whose parameters or buffers have changed since the posterior was made."""
        if self.module is self.model and any(module.training for module in self.model.modules()):
            msg = "The model could not be copied, so it must stay as it was fitted: call model.eval()."
            raise ModelError(msg)
        with self.lock:
            if "places" not in self.cache:
                self.cache["places"] = Places(self.model)
            current = self.cache["places"].tensors()
        for name, old in self._trained.items():
            new = current.get(name)
            if new is None or (new.dtype, new.device) != (old.dtype, old.device) or not _same(new.detach(), old):
                msg = (
                    f"{name!r} of the model has changed since the posterior was made: "
                    "load the old parameters back, or make and fit a new posterior."
                )
                raise ModelError(msg)

    def fingerprint(self) -> str:
        """Return a hash of all parameters and buffers of the model as they are now: names, shapes and bytes."""
        return fingerprint(sorted(tensors_of(self.model).items()))


def _alone(x: Any) -> Any:
    """Return one example, without a dimension of examples, as a batch of one."""
    return map_leaves(lambda leaf: leaf[None], x)


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors entry by entry; NaN, which a buffer may hold, equals NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))


def the_output(returned: Any) -> Tensor:  # (n, ...)
    """Return the output among what a model returns: its only tensor, or the one called "logits"."""
    if isinstance(returned, Tensor):
        return returned
    named, how = _by_name(returned)
    logits = None if named is None else named.get("logits")
    if isinstance(logits, Tensor):
        return logits
    parts, what = returned if named is None else named, type(returned).__name__
    if isinstance(parts, (Mapping, tuple, list)):
        found = [leaf for leaf in leaves(parts) if leaf.is_floating_point()]
        if len(found) == 1:
            return found[0]
        what += f" with {len(found)} floating-point tensors" + (f" ({', '.join(map(str, named))})" if named else "")
    article = "an" if what[0] in "AEIOUaeiou" else "a"
    msg = f"The model returns {article} {what}: say which is its output with output_fn=lambda returned: returned{how}."
    raise ModelError(msg)


def _by_name(returned: Any) -> tuple[Mapping[Any, Any] | None, str]:
    """Return what is returned by name, of mappings, named tuples, dataclasses, objects with logits; how to select."""
    if isinstance(returned, Mapping):
        return returned, "[...]"
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return dict(zip(returned._fields, returned, strict=True)), ".NAME"
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}, ".NAME"
    if isinstance(returned, (tuple, list)):
        return None, "[...]"
    return {"logits": returned.logits} if isinstance(getattr(returned, "logits", None), Tensor) else None, ".NAME"


def _single(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype in HALF else leaf.clone()


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for an input: several for a tuple, by name for a mapping."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, tuple) else ((x,), {})


class Leaves:
    """A network at its trained parameters, each a tensor of its own that can be differentiated with respect to.

    A call of :class:`Network` with the flat vector cuts it into parts, looks up the place of each in the module, and
    joins their gradients again. For one input of a small network that takes longer than the network itself.

    Parameters
    ----------
    network : Network
        The function of the parameters. The leaves share the memory of its flat vector.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        with torch.inference_mode(False):
            theta = network.theta.clone() if network.theta.is_inference() else network.theta.detach()
            self.tensors = tuple(piece.detach().requires_grad_() for piece in network.unflatten(theta).values())
        module, named = network.module, dict(zip(network.names, self.tensors, strict=True))
        leaf_of = {id(p): named[name] for name, p in module.named_parameters() if name in named}
        tables = {id(leaf_of.get(id(part.weight))) for part in module.modules() if isinstance(part, nn.Embedding)}
        self.are_tables = [id(leaf) in tables for leaf in self.tensors]  # of which an input takes a few lines
        self._places = [  # all of them, where a parameter has several
            (part._parameters, name, leaf_of[id(p)])
            for part in module.modules()
            for name, p in part._parameters.items()
            if id(p) in leaf_of
        ]

    @staticmethod
    def of(network: Network) -> Leaves | None:
        """Return the leaves of a network, made once.

        None where it is not enough to exchange tensors in a module's dictionary of parameters: recurrent layers and
        scripts keep references of their own.
        """
        with network.lock:
            if "leaves" not in network.cache:
                kept = any(isinstance(m, (nn.RNNBase, torch.jit.ScriptModule)) for m in network.module.modules())
                network.cache["leaves"] = None if kept else Leaves(network)
            found: Leaves | None = network.cache["leaves"]
            return found

    def outputs(self, x: Any) -> Tensor:  # (n, ...)
        """Evaluate the network."""
        return self.network.evaluate(x, self._run).to(self.network.dtype)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = [own[name] for own, name, _ in self._places]
        try:
            for own, name, leaf in self._places:
                own[name] = leaf  # type: ignore[assignment]
            return self.network.module(*args, **kwargs)
        finally:
            for (own, name, _), tensor in zip(self._places, before, strict=True):
                own[name] = tensor
