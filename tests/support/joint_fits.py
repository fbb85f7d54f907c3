"""Fits that the processes of tests/distributed make, and that one process makes for comparison."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nullbayes as nb
from nullbayes.projectors import Alternating, Krylov, Projector

N, SAMPLES = 20, 18
BLOCKS = Krylov(Alternating(block_rows=12, coarse=20), rtol=1e-8)  # 62 sweeps in one process


def data(n: int = N) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu")
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)).double().cpu()


def posterior(kind: str, fitted_to: Any = None, **options: Any) -> nb.ProjectedPosterior:
    """A posterior of one kind: "outputs", "losses" or "regression"."""
    x, y = data()
    if kind == "regression":
        y = torch.stack([x[:, 0], x.sum(1) / 3.0, x[:, 1] * x[:, 2]], dim=1)
    likelihood = "regression" if kind == "regression" else "classification"
    precision = 1e6 if "projector" in options else "auto"  # a trial takes its time
    make = nb.LossProjectedPosterior if kind == "losses" else nb.ProjectedPosterior
    made = make(network(), likelihood, prior_precision=precision)
    options = {"n_samples": SAMPLES, "generator": torch.Generator().manual_seed(3), "progress": False, **options}
    return made.fit((x, y) if fitted_to is None else fitted_to, **options)


def found(fitted: nb.ProjectedPosterior, parallel: str | None) -> dict[str, Any]:
    """What a fit leaves behind: samples, its report, what it remembers, and an answer."""
    predict = partial(nb.in_parallel, fitted.predict) if parallel == "data" else fitted.predict
    report = fitted.report.to_dict()
    del report["seconds"], report["peak_memory"]
    familiar = fitted._familiar
    assert familiar is not None
    assert familiar.probe is not None
    return {
        "directions": fitted.directions,
        "report": report,
        "data": fitted._need_measured().data,
        "features": familiar.features,
        "sums": familiar.sums,
        "answers": familiar.probe.outputs,
        "variance": predict(2.0 * data()[0]).variance,
    }


def fit(rank: int, kind: str, parallel: str | None, options: dict[str, Any]) -> dict[str, Any]:
    return found(posterior(kind, parallel=parallel, **options), parallel)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "outputs": ("outputs", {}),
    "outputs in blocks": ("outputs", {"projector": BLOCKS}),
    "losses in blocks": ("losses", {"projector": BLOCKS, "tolerance": 1e-9}),
    "regression": ("regression", {}),
}


QUICK = ("outputs in blocks",)


def fits(rank: int, parallel: str | None, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Some of the fits, one after the other."""
    return {name: fit(rank, kind, parallel, options) for name in names for kind, options in [CASES[name]]}


def extended(rank: int, parallel: str | None) -> dict[str, Tensor]:
    """More samples of a fit: at once, and after its training data were opened again."""
    fitted = posterior("outputs", n_samples=10, projector=BLOCKS, parallel=parallel).extend(4)
    again = fitted.release().prepare(*data(), projector=BLOCKS, parallel=parallel).extend(4)
    exact = again.functional_variance(2.0 * data()[0][:2], exact=True)
    return {"directions": again.directions, "exact": exact}


class Counted(Dataset[Any]):
    """Examples that count how often they are read."""

    def __init__(self) -> None:
        self.pairs, self.read = TensorDataset(*data()), [0] * N

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        self.read[i] += 1
        return self.pairs[i]


def loaders(rank: int) -> dict[str, Any]:
    """Fits to loaders of several kinds, and which examples each process has read."""
    n, outcome = torch.distributed.get_world_size(), dict[str, Any]()
    x, y = data()
    counted = Counted()
    outcome["DataLoader"] = posterior("outputs", DataLoader(counted, batch_size=7), parallel="data").directions
    outcome["read"] = [i for i in range(N) if counted.read[i]]
    divided = DistributedSampler(TensorDataset(x, y), n, rank, shuffle=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=5, sampler=divided)
    outcome["divided"] = posterior("outputs", loader, parallel="data")
    outcome["answers"] = nb.in_parallel(outcome["divided"].predict, loader)
    scored = outcome["divided"].ood_score
    outcome["scores"] = (
        scored(2.0 * x),
        nb.in_parallel(scored, 2.0 * x),
        nb.in_parallel(scored, [2.0 * x[:9], 2.0 * x[9:]]),
    )
    outcome["divided"] = outcome["divided"].directions
    batches = [(x[i : i + 5], y[i : i + 5]) for i in range(0, N, 5)]
    outcome["list"] = posterior("outputs", batches, parallel="data").directions
    arrays = x.float().numpy(), y.numpy()  # of another type than the network
    outcome["arrays"] = (
        posterior("outputs", arrays, parallel="data").directions,
        posterior("outputs", arrays).directions,
    )
    outcome["of arrays"] = nb.in_parallel(scored, arrays[0]), scored(arrays[0])
    outcome["one batch"] = posterior("outputs", [(x, y)], parallel="data").directions
    outcome["stream"] = posterior("outputs", Stream(batches), parallel="data").directions
    odd = DistributedSampler(TensorDataset(x[:-1], y[:-1]), n, rank, shuffle=False)
    shuffled = DistributedSampler(TensorDataset(x, y), n, rank)
    for name, sampler in (("repeats", odd), ("shuffles", shuffled)):
        outcome[name] = refusal(
            lambda s=sampler: posterior("outputs", DataLoader(s.dataset, sampler=s), parallel="data")
        )  # type: ignore[misc]
    with blocks_chosen():
        planned = nb.plan(network(), (x, y), SAMPLES, processes=n)
        outcome["plans"] = planned.reason, posterior("outputs", parallel="data").report.reason
    outcome["too few"] = refusal(lambda: posterior("outputs", (x[:1], y[:1]), parallel="data"))
    return outcome


class Stream:
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def refusal(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def bad_input(rank: int) -> dict[str, Any]:
    """What each process raises when one of them has bad data, or a program that fails; and an exchange after it."""
    x, y = data()
    with_nan = x.clone()
    with_nan[-1, 0] = torch.nan  # an example of the last process
    return {
        "nan": refusal(lambda: posterior("outputs", (with_nan, y), parallel="data")),
        "bug": refusal(lambda: nb.in_parallel(lambda part: 1 / rank if rank == 0 else part, x)),
        "after": nb.in_parallel(lambda part: part, x),
    }


def trouble(rank: int) -> dict[str, Any]:
    """What each process raises when they have different data, run out of memory, or go their own ways."""
    x, y = data()
    wide = [(x[:10], y[:10]), (x[10:, :4], y[10:])]
    return {
        "wide": refusal(lambda: posterior("outputs", wide, parallel="data")),
        "after": posterior("outputs", parallel="data").directions,  # the processes still understand each other
        "memory": memory(rank),
        "apart": refusal(lambda: posterior("outputs", parallel="data" if rank else "samples")),
    }


def memory(rank: int) -> dict[str, Any]:
    """A fit in which one process runs out of memory once."""
    import nullbayes.posteriors.fitting as fitting

    build, calls = fitting.build, []

    def short(*arguments: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise MemoryError
        return build(*arguments)

    fitting.build = short
    fitted = posterior("outputs", projector=BLOCKS, parallel="data")
    fitting.build = build
    return {"directions": fitted.directions, "notes": fitted.report.notes, "calls": len(calls)}


@contextmanager
def blocks_chosen() -> Iterator[None]:
    """Let "auto" choose blocks for small problems, too; these depend on the number of processes."""
    from nullbayes.projectors import auto

    direct, auto._DIRECT = auto._DIRECT, 0
    try:
        yield
    finally:
        auto._DIRECT = direct


def checkpointed(folder: str, parallel: str, projector: str | Projector) -> nb.ProjectedPosterior:
    with blocks_chosen():
        return posterior("outputs", projector=projector, tolerance=1e-8, parallel=parallel, checkpoint=f"{folder}/fit")


def killed(rank: int, folder: str, parallel: str, projector: str | Projector) -> dict[str, Any]:
    """A fit whose last process kills itself in its third sweep; the others say what they see, and when."""
    from nullbayes.posteriors import checkpoint
    from nullbayes.posteriors.progress import Progress

    checkpoint._EVERY, checkpoint._SHARE = 0.0, 1e9
    last, sweeps = torch.distributed.get_world_size() - 1, Progress.sweeps

    def watched(self: Progress, tolerance: float) -> Any:
        show = sweeps(self, tolerance)

        def dying(sweep: int, residual: Tensor) -> None:
            if rank == last and sweep >= 3:
                Path(folder, "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            show(sweep, residual)

        return dying

    Progress.sweeps = watched  # type: ignore[method-assign]
    said = refusal(lambda: checkpointed(folder, parallel, projector))
    return {"said": said, "seconds": time.time() - float(Path(folder, "killed").read_text())}


def resumed(rank: int, folder: str, parallel: str, projector: str | Projector) -> dict[str, Any]:
    """The fit that was killed, continued; and the sweeps at which its residual was measured."""
    from nullbayes.posteriors.progress import Progress

    sweeps, seen = Progress.sweeps, list[int]()

    def watched(self: Progress, tolerance: float) -> Any:
        return lambda sweep, residual: seen.append(sweep)

    Progress.sweeps = watched  # type: ignore[method-assign]
    try:
        fitted = checkpointed(folder, parallel, projector)
    finally:
        Progress.sweeps = sweeps  # type: ignore[method-assign]
    return {"directions": fitted.directions, "sweeps": seen}
