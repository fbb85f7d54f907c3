"""Answers about many inputs, of which each process works out a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from nullbayes.distributed import resolve
from nullbayes.errors import SettingsError
from nullbayes.jacobian.sharding import in_order, own_inputs
from nullbayes.predictive.prediction import Prediction

T = TypeVar("T")


def in_parallel(function: Callable[[Any], T], x: Any) -> T:
    """Ask a method about inputs in several processes: each takes a part of the inputs, and all get all answers.

    Parameters
    ----------
    function : callable (inputs) -> Tensor (N, ...), Prediction, or a tuple of these
        Such as ``posterior.predict``, ``posterior.ood_score`` or ``posterior.is_ood``: one answer per input.
    x : Tensor, array, tuple, mapping, dataset or loader
        All inputs, the same in every process; or a loader whose DistributedSampler, without shuffling, gives each
        process its part.

    Returns
    -------
    Tensor, Prediction or tuple
        What ``function(x)`` returns in one process, in the order of the inputs.

    Raises
    ------
    DataError
        If the inputs are fewer than the processes, or the loader repeats or drops some of them.
    SettingsError
        If the processes divide the parameters of the posterior: they predict the same inputs together.

    Examples
    --------
    In a script that ``torchrun`` starts, after ``nb.distributed.init()``; a process by itself calls the function:

    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(4, 2, bias=False), torch.eye(4)
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], torch.tensor([0, 1]))
    >>> nb.in_parallel(posterior.predict, x).mean.shape, nb.in_parallel(posterior.ood_score, x).shape
    (torch.Size([4, 2]), torch.Size([4]))
    """
    group = resolve("data")
    if group.size == 1:
        return function(x)
    with group.together():
        part, turns = own_inputs(x, group)
        with group.apart():
            answer = function(part)
        joined = _joined(answer, partial(in_order, group, turns=turns))
    if isinstance(joined, Prediction) and hasattr(x, "iloc"):
        joined = replace(joined, index=x.index)
    return cast("T", joined)


def _joined(answer: Any, join: Callable[[Tensor, int], Tensor]) -> Any:
    if isinstance(answer, Tensor):
        return join(answer.byte(), 0).bool() if answer.dtype == torch.bool else join(answer, 0)
    if isinstance(answer, tuple):
        return tuple(_joined(part, join) for part in answer)
    if isinstance(answer, Prediction):
        tensors: dict[str, Any] = {
            name: _joined(getattr(answer, name), join)
            for name in ("mean", "variance", "probs", "mask")
            if getattr(answer, name) is not None
        }
        return replace(answer, samples=join(answer.samples, 1), **tensors)
    msg = f"in_parallel joins tensors and predictions with an entry per input, not a {type(answer).__name__}."
    raise SettingsError(msg)
