"""Samples that processes share: each projects some of them, and all get all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from nullbayes.distributed import Group
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.posteriors.measure import Prepared
from nullbayes.posteriors.progress import Progress
from nullbayes.projectors import Info, Outcome, Projection
from nullbayes.projectors.stopping import mean_and_error

TOGETHER = 16  # samples that are projected in one go, whatever the number of processes, so that they are the same bits


def project_some(
    group: Group, prepared: Prepared, noise: Tensor, bar: Progress, store: Checkpoint | None
) -> Projection:  # (S, P)
    """Project noise, some of the samples in each process of a group; all processes get all samples.

    Products with more vectors at a time may differ in their last bits. So samples are projected in groups that depend
    on nothing but their numbers.
    """
    projector, state = prepared.plan.projector, prepared.state
    parts, found = noise.split(TOGETHER), dict[int, Projection]()
    with contextlib.ExitStack() as files:  # which stay until all processes are done
        for i in range(group.rank, len(parts), group.size):
            own = None if store is None else files.enter_context(store.part(i))
            found[i] = projector.apply(state, parts[i], callback=bar.sweeps(projector.rtol), store=own)
            if found[i].info.outcome is Outcome.INTERRUPTED:
                raise KeyboardInterrupt
        infos = group.gather({i: _on_host(projection.info) for i, projection in found.items()})
    every = {i: info for some in infos for i, info in some.items()}
    device, dtype = prepared.rows.device, prepared.rows.dtype
    directions = [
        group.broadcast(found[i].directions if i in found else part.to(device, dtype), i % group.size)
        for i, part in enumerate(parts)
    ]
    return Projection(torch.cat(directions), joined([every[i] for i in range(len(parts))], noise.shape[1]))


def joined(infos: Sequence[Info], n_parameters: int) -> Info:
    """Return one account of samples that were projected one group after the other."""
    first = infos[0]
    together: dict[str, Any] = {
        field.name: torch.cat([getattr(info, field.name) for info in infos])
        for field in fields(first)
        if isinstance(getattr(first, field.name), Tensor)
    }
    dimension, error = mean_and_error(together["traces"], n_parameters)
    if first.rank is not None:
        dimension, error = first.kernel_dimension, first.kernel_dimension_stderr
    return replace(
        first,
        **together,
        outcome=next((info.outcome for info in infos if info.outcome is not Outcome.CONVERGED), Outcome.CONVERGED),
        sweeps=max(info.sweeps for info in infos),
        kernel_dimension=dimension,
        kernel_dimension_stderr=error,
    )


def _on_host(info: Info) -> Info:
    moved: dict[str, Any] = {name: value.cpu() for name, value in vars(info).items() if isinstance(value, Tensor)}
    return replace(info, **moved)
