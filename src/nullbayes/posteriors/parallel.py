"""What the processes of a fit share: training data, samples or parameters; a process by itself shares nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nullbayes.distributed import Group, resolve
from nullbayes.errors import DistributedError, NullBayesWarning, SettingsError
from nullbayes.jacobian.division import divide
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.jacobian.sharding import Shard
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.posteriors.measure import Prepared
from nullbayes.posteriors.plan import FitRequest
from nullbayes.posteriors.progress import Meter, Progress
from nullbayes.posteriors.sigma import with_noise
from nullbayes.projectors import Info, Outcome, Projection, Projector
from nullbayes.projectors.stopping import mean_and_error

RowKind = partial[JacobianRows]  # of a network and a batch_fn: (data, likelihood) -> rows
TOGETHER = 16  # samples that are projected in one go, whatever the number of processes, so that they are the same bits


def project(prepared: Prepared, noise: Tensor, bar: Progress, store: Checkpoint | None) -> Projection:  # (S, P)
    """Project noise; where processes share the samples, each projects some of them, and all get all.

    Products with more vectors at a time may differ in their last bits. So samples are projected in groups that depend
    on nothing but their numbers.
    """
    projector, state, group = prepared.plan.projector, prepared.state, prepared.request.samples
    if group is None:
        return projector.apply(state, noise, callback=bar.sweeps(projector.rtol), store=store)
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


def slowest(group: Group, meter: Meter) -> tuple[dict[str, float], int | None]:
    """Return the seconds per phase and the peak of memory, each of the process that needed most."""
    every = group.gather((meter.seconds, meter.peak()))
    seconds = {name: max(seconds.get(name, 0.0) for seconds, _ in every) for name in meter.seconds}
    return seconds, max((peak for _, peak in every if peak is not None), default=None)


@contextlib.contextmanager
def one_voice(group: Group) -> Iterator[None]:
    """Let only the first process warn, and let all fail if one fails."""
    if group.size == 1:
        yield
        return
    with warnings.catch_warnings(), group.together():
        if group.rank:
            warnings.simplefilter("ignore", NullBayesWarning)
        yield


@dataclass(frozen=True)
class Shared:
    """What the processes of a fit share: the training data, the samples, the parameters, or nothing."""

    what: str | None
    group: Group

    @property
    def speaks(self) -> bool:
        """Whether this is the process that shows its progress."""
        return self.group.rank == 0


@contextlib.contextmanager
def sharing(parallel: str | None) -> Iterator[Shared]:
    """Join the processes of a call with ``parallel=...``: all of them fail if one does, and the first speaks."""
    group = resolve(parallel)
    with one_voice(group):
        yield Shared(parallel, group)


def network_of(network: Network, shared: Shared) -> Network:
    """Return the network of all parameters, or of those of this process, where processes divide the parameters."""
    whole = network.whole
    if shared.what != "parameters" or shared.group.size == 1:
        return whole
    _check_same(shared.group, whole.fingerprint(), "networks", "load the same state_dict in every process")
    return whole.part(divide(whole.sizes, shared.group))


def refuse_checkpoint(network: Network, checkpoint: object) -> None:
    """Refuse a checkpoint where each process has the state of some parameters only."""
    if checkpoint is not None and network.division is not None:
        msg = (
            'checkpoint=... is not offered with parallel="parameters": leave it out. Samples can be saved in between: '
            "fit(loader, 8), save, then extend(8) and save again."
        )
        raise SettingsError(msg)


def _check_same(group: Group, mine: str, what: str, advice: str) -> None:
    if len(set(group.gather(mine))) > 1:
        msg = f'The processes have different {what}: with parallel="parameters" {advice}.'
        raise DistributedError(msg)


def request(
    kind: RowKind,
    data: Any,
    likelihood: Likelihood,
    shared: Shared,
    n_samples: int,
    projector: str | Projector,
    tolerance: float,
    memory_limit: int | str | None,
    *,
    tuned: bool = False,
) -> FitRequest:
    """Open the training data of a fit, or this process's part of them, and ask for samples."""
    if shared.what == "data" and shared.group.size > 1:
        network, batch_fn = kind.args[0], kind.keywords["batch_fn"]
        data = Shard(data, batch_fn, network.device, shared.group, dtype=network.dtype)
    rows = open_rows(kind, data, likelihood, tuned=tuned)
    if shared.what == "parameters":
        advice = "pass all data in every process, without a DistributedSampler"
        _check_same(shared.group, rows.examples.fingerprint(), "data", advice)
    samples = shared.group if shared.what == "samples" else None
    return FitRequest(rows, n_samples, projector, tolerance, memory_limit, samples)


def open_rows(kind: RowKind, data: Any, likelihood: Likelihood, *, tuned: bool = False) -> JacobianRows:
    """Open the training data, and estimate the noise of a regression where it was not given.

    The estimate warns where it is worth little, unless the noise is ``tuned`` afterwards.
    """
    rows = kind(data, likelihood)
    if rows.likelihood.name == "regression":
        noisy = with_noise(likelihood, rows, tuned=tuned)
        rows = rows if noisy is rows.likelihood else kind(rows.examples, noisy)
    return rows
