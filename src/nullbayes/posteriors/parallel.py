"""The part of each process where several share a fit: some training data, some parameters, or some samples."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from nullbayes.distributed import Group
from nullbayes.errors import DistributedError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.division import divide
from nullbayes.jacobian.network import Network
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.posteriors.plan import Prepared, RowSource, Shared
from nullbayes.posteriors.progress import Progress
from nullbayes.projectors import Info, Outcome, Projection
from nullbayes.projectors.stopping import mean_and_error

TOGETHER = 16  # samples that are projected in one go, whatever the number of processes, so that they are the same bits


def divided(network: Network, group: Group, checkpoint: object) -> Network:
    """Return the network as a function of the parameters of this process; refuse a checkpoint, which holds all."""
    if checkpoint is not None:
        msg = (
            'checkpoint=... is not offered with parallel="parameters": leave it out. Samples can be saved in between: '
            "fit(loader, 8), save, then extend(8) and save again."
        )
        raise SettingsError(msg)
    _check_same(group, network.fingerprint(), "networks", "load the same state_dict in every process")
    return network.part(divide(network.sizes, group))


def own_data(source: RowSource, data: Any, shared: Shared) -> Any:
    """Return the training data that this process reads: a part of them, or all."""
    network, group = source.network, shared.group
    if shared.what == "data":
        return Examples(data, source.batch_fn, network.device, dtype=network.dtype, group=group)
    if network.division is not None:
        data = Examples(data, source.batch_fn, network.device, dtype=network.dtype)
        _check_same(group, data.fingerprint(), "data", "pass all data in every process")
    return data


def _check_same(group: Group, mine: str, what: str, advice: str) -> None:
    if len(set(group.gather(mine))) > 1:
        msg = f'The processes have different {what}: with parallel="parameters" {advice}.'
        raise DistributedError(msg)


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
