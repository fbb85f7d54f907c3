"""What the processes of a fit share: training data, samples or parameters; a process by itself shares nothing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nullbayes.distributed import Group, resolve
from nullbayes.errors import DistributedError, NullBayesWarning, SettingsError, UntrainedWarning
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.division import divide
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.jacobian.sharding import Shard
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.plan import FitRequest
from nullbayes.posteriors.progress import Meter
from nullbayes.posteriors.sigma import with_noise
from nullbayes.projectors import Projector

RowKind = partial[JacobianRows]  # of a network and a batch_fn: (data, likelihood) -> rows


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
    network, batch_fn = kind.args[0], kind.keywords["batch_fn"]
    if shared.what == "data" and shared.group.size > 1:
        data = Shard(data, batch_fn, network.device, shared.group, dtype=network.dtype)
    elif network.division is not None:
        data = Examples(data, batch_fn, network.device, dtype=network.dtype)
        _check_same(shared.group, data.fingerprint(), "data", "pass all data in every process")
    rows = open_rows(kind, data, likelihood, tuned=tuned)
    samples = shared.group if shared.what == "samples" else None
    return FitRequest(rows, n_samples, projector, tolerance, memory_limit, samples)


def open_rows(kind: RowKind, data: Any, likelihood: Likelihood, *, tuned: bool = False) -> JacobianRows:
    """Open the training data, and estimate the noise of a regression where it was not given.

    The estimate warns where it is worth little, unless the noise is ``tuned`` afterwards.
    """
    rows = kind(data, likelihood)
    if rows.likelihood.name == "regression":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrainedWarning)  # which there was when the data were opened first
            noisy = with_noise(likelihood, rows, tuned=tuned)
            rows = rows if noisy is rows.likelihood else kind(rows.examples, noisy)
    return rows
