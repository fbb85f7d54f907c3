"""The modules of users, which may be wrapped or in half precision; and which of their parameters vary.

The user's module is never changed; one that would change itself is refused. Its structure is copied; tensors are shared
with the copy unless they are in half precision, which has no linear algebra.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from nullbayes.errors import InputError, ModelError, NullBayesError
from nullbayes.torch_internals import before_compilation, is_batch_norm

Selection = None | str | Iterable[str] | Callable[[str, nn.Parameter], bool]
HALF = (torch.bfloat16, torch.float16)
_TABLES = (F.embedding, F.embedding_bag)
_WRITTEN = (
    "The network changes its parameter {!r} in place whenever it is called: for a trained network leave that out of "
    "forward, or compute a new tensor, such as weight.clamp(min=0.0) instead of weight.clamp_(min=0.0)."
)
_NO_VALUES = ("requires_grad_", "detach_", "share_memory_", "rename_")  # which end like operations that write
_ASSIGN: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that only say how to run it: compiled, or distributed over devices."""
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif (inner := before_compilation(model)) is not None:
            model = inner
        else:
            return model


def evaluation_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that can be differentiated, or say why there is none."""
    _refuse(model)
    tensors = [*model.parameters(), *model.buffers()]
    with torch.inference_mode(False):  # the copy has buffers of its own, which a forward pass may write
        own = {id(t): _single(t) for t in model.parameters()} | {id(t): _single(t).clone() for t in model.buffers()}
    results = [v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
    try:
        module = copy.deepcopy(model, own | {id(t): t.detach() for t in results})
    except Exception as error:
        if any(m.training for m in model.modules()) or any(t.dtype in HALF for t in tensors):
            msg = (
                f"The model cannot be copied ({error}), which one in training mode or in half precision must be: "
                "call model.eval(), and model.float()."
            )
            raise ModelError(msg) from error
        return model
    _evaluate(module, model)
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # which zeroes a gradient although the padding embedding does affect the output
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            layer.sparse = False
            layer.scale_grad_by_freq = False  # which divides a gradient by the number of times a token occurs
    return module


def _evaluate(module: nn.Module, model: nn.Module) -> None:
    """Set a copy to evaluation mode; refuse one that changes the weights by that, because they are the user's."""
    if not any(type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval for m in module.modules()):
        module.eval()
        return
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    module.eval()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    if changed:
        msg = (
            f"{changed[0]!r} changes when the model goes into evaluation mode (adapters that are merged?): "
            "call model.eval() before you make a posterior."
        )
        raise ModelError(msg)


def select_parameters(model: nn.Module, parameters: Selection) -> dict[str, nn.Parameter]:
    """Return the parameters that vary, by name, or say why the selection cannot be taken."""
    chosen = _matching(model, parameters)
    _check_uniform(chosen)
    bad = next((name for name, p in chosen.items() if not torch.isfinite(p.detach()).all()), None)
    if bad is not None:
        msg = f"Parameter {bad!r} holds NaN or Inf: the network cannot have been trained to this state."
        raise ModelError(msg)
    return chosen


def _matching(model: nn.Module, parameters: Selection) -> dict[str, nn.Parameter]:
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
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter by each of its names
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
            raise ModelError(_no_match(pattern, list(named)))
    matching = {id(p) for n, p in named.items() if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)}
    return {name: p for name, p in everything.items() if id(p) in matching}


def _no_match(pattern: str, names: list[str]) -> str:
    """Say what a pattern without a match may have meant: all of a layer, or a similar name."""
    for longer in (f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"):
        if fnmatch.filter(names, longer):
            return f"parameters={pattern!r} is the name of no parameter: {longer!r} would match some."
    alike = difflib.get_close_matches(pattern, names, 8) or names[:8]
    more = ", ..." if len(names) > len(alike) else ""
    return f"parameters={pattern!r} matches none of {', '.join(alike)}{more}: pass a name of these, or a glob."


def _check_uniform(chosen: Mapping[str, Tensor]) -> None:
    """Refuse parameters on several devices, of several precisions, or of integers."""
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
    if any(p.is_meta for p in chosen.values()):
        msg = "The parameters have no values (device meta): build the model on a real device, and load its weights."
        raise ModelError(msg)
    if not all(p.is_floating_point() for p in chosen.values()):
        msg = "Only floating-point parameters can vary: restrict parameters=... to those."
        raise ModelError(msg)


def _single(tensor: Tensor) -> Tensor:
    if tensor.dtype not in HALF:
        return tensor
    single = tensor.detach().float()
    return nn.Parameter(single, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else single


def _refuse(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        msg = "The model is a TorchScript module, whose parameters cannot be varied: pass the nn.Module it came from."
        raise ModelError(msg)
    divided = next((name for name, p in model.named_parameters() if hasattr(p, "full_tensor")), None)  # DTensor
    if divided is not None:
        msg = (
            f"Parameter {divided!r} is divided over processes (a DTensor of FSDP2 or tensor parallelism), and a "
            "posterior needs a model that each process has as a whole: with torch.distributed.checkpoint.state_dict, "
            "own = build(); own.load_state_dict(get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True))). The posterior itself can be divided, "
            'fit(..., parallel="parameters").'
        )
        raise ModelError(msg)
    for name, layer in model.named_modules():
        if any(nn.parameter.is_lazy(p) for p in layer.parameters(recurse=False)):
            msg = (
                f"Layer {name!r} has not seen an input yet, so that its parameters have no shape: call the model once."
            )
            raise ModelError(msg)
        if is_batch_norm(layer) and layer.running_mean is None:
            msg = (
                f"Layer {name!r} normalizes by the statistics of the batch (track_running_stats=False), so examples "
                "influence each other: train it with running statistics, or use GroupNorm."
            )
            raise ModelError(msg)
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            msg = (
                f"Layer {name!r} changes its own weights whenever it is called (max_norm): for a trained model set "
                f"model.{name}.max_norm = None."
            )
            raise ModelError(msg)


@contextlib.contextmanager
def lines_checked(module: nn.Module) -> Iterator[None]:
    """Name the table of embeddings that is asked for a line outside of it, if the call fails for that reason."""

    def check(name: str, table: Any) -> Callable[..., None]:
        def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            lines = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            for line in (int(lines.min()), int(lines.max())):
                if not 0 <= line < table.num_embeddings:
                    msg = (
                        f"The network asks its table of embeddings {name!r} for line {line}, and it has the lines 0 to "
                        f"{table.num_embeddings - 1}: a token or category that it was not made for, or an input that "
                        "is longer than its positions. Encode and cut the inputs as in training."
                    )
                    raise InputError(msg)

        return look

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                hooks.enter_context(part.register_forward_pre_hook(check(name, part), with_kwargs=True))
        try:
            yield
        except InputError:
            raise
        except Exception:  # it fails by something else, which the caller reports
            return


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
