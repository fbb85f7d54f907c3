"""Fits of processes that divide the parameters, for tests/distributed, and what one process does for comparison."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nullbayes as nb
from nullbayes.distributed import resolve
from nullbayes.integrations.export import export
from nullbayes.jacobian.division import divide
from nullbayes.jacobian.network import Network
from nullbayes.linalg.shared import DividedRows
from nullbayes.posteriors.arguments import Noise
from nullbayes.projectors import Alternating, ExactDual, Krylov, Projector
from support.joint_fits import blocks_chosen, data, network, posterior, refusal
from support.joint_work import noise_for
from support.projector_table import CASES

FINE = Krylov(Alternating(block_rows=12), rtol=1e-9)
DUAL: dict[str, Projector] = {
    "direct": ExactDual(rtol=1e-8),
    "blocks": Krylov(Alternating(block_rows=3), rtol=1e-8),
    "one block": Krylov(Alternating(block_rows=1000), rtol=1e-8),
    "one after the other": Alternating(block_rows=3, rtol=1e-8),
}
MATRICES = ("full_rank", "zero_rows", "tall_rank_deficient")
NEW = 2.0 * data()[0]


def own_columns(whole: Tensor) -> slice:
    """Unequal parts: the last process has most of the columns."""
    group, p = resolve("parameters"), whole.shape[-1]
    edges = [*(i * p // (2 * group.size) for i in range(group.size)), p]
    return slice(edges[group.rank], edges[group.rank + 1])


def divided(rank: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Products with matrices whose columns are divided, and projections on their null space, as a whole."""
    group, found = resolve("parameters"), dict[str, Any]()
    for name in MATRICES:
        a, vectors = CASES[name].matrix, noise_for(CASES[name].matrix)
        where = own_columns(a)
        rows = DividedRows(nb.DenseRows(a[:, where], 3), group)
        mine = vectors[:, where]
        found |= {
            f"{name} mv": rows.mv(mine),
            f"{name} rmv": group.join(rows.rmv(rows.mv(mine)), dim=1),
            f"{name} norms": rows.norms(mine),
            f"{name} lengths": rows.lengths(),
            f"{name} gram": rows.gram(torch.float64),
            f"{name} dense": group.join(rows.dense(), dim=1),
            f"{name} frobenius": rows.frobenius(),
            f"{name} vectors": rows.vector_lengths(mine),
        }
        for kind in kinds:
            if kind == "one after the other" and name != "full_rank":
                continue  # which converges slowly
            projector = DUAL[kind]
            projection = projector.apply(projector.prepare(rows), mine)
            found[f"{name}: {kind}"] = group.join(projection.directions, dim=1), projection.info
        widest = max(group.gather(rows.n_columns))
        found[f"{name} passes"] = []
        for n_rows in (2, 1):
            rows.working_bytes = 16 * widest * n_rows  # squares in float64 of so many rows of the widest process
            found[f"{name} passes"].append(rows.rows_per_pass)
    return found


def fitted(kind: str, parallel: str | None, **options: Any) -> dict[str, Any]:
    """What a fit leaves behind in one process: its samples as a whole, its report, and answers."""
    made = posterior(kind, parallel=parallel, **options)
    report = made.report.to_dict()
    del report["seconds"], report["peak_memory"], report["reason"]
    scores = {score: made.ood_score(NEW, score) for score in made.scores if score != "combined"}
    labels = data()[1] if kind != "regression" else torch.zeros(len(NEW), 3, dtype=torch.float64)
    assert made._familiar is not None
    return {
        "features": made._familiar.features,
        "directions": made._network.all_columns(made.directions),
        "report": report,
        "prediction": made.predict(NEW),
        "sampled": made.predict(NEW, pred_type="sampled").mean,
        "parameters": made.sample(2),
        "scores": scores,
        "check": made.check_fit(NEW, labels).to_dict(),
        "own": made.directions.shape[1],
    }


FITS: dict[str, tuple[str, dict[str, Any]]] = {
    "outputs": ("outputs", {}),
    "outputs in blocks": ("outputs", {"projector": FINE}),
    "losses in blocks": ("losses", {"projector": FINE}),
    "regression": ("regression", {}),
    "formed again": ("losses", {"projector": FINE, "memory_limit": 24_000}),  # by itself, the first could hold its rows
}


def fits(rank: int, parallel: str | None, names: tuple[str, ...]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network has not been trained
        return {name: fitted(FITS[name][0], parallel, **FITS[name][1]) for name in names}


def everything(rank: int, kinds: tuple[str, ...], names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    return divided(rank, kinds), fits(rank, "parameters", names)


def noise(rank: int) -> tuple[Tensor, Tensor]:
    """The noise of samples 3 to 6 as the processes draw it together: N(0, I), and that of a base distribution."""
    whole = Network(network())
    part = whole.part(divide(whole.sizes, resolve("parameters")))
    drawn = [Noise(base, 5).draw(part, 3, 4) for base in (None, based)]
    return part.all_columns(drawn[0]), part.all_columns(drawn[1])


def based(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(n, *p.shape, generator=generator) for name, p in network().named_parameters()}


def story(rank: int, path: str) -> dict[str, Any]:
    """A posterior that is fitted, extended, saved, opened again and asked; and everything that is refused."""
    x, y = data()
    held_out = torch.randn(60, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    made = posterior("outputs", n_samples=10, projector=FINE, parallel="parameters").extend(4)
    made.save(path)
    outcome: dict[str, Any] = {"prediction": made.predict(NEW), "repr": repr(made)}
    made.calibrate(held_out, (held_out[:, 0] > 0).long())
    outcome["p-values"] = made.p_value(NEW)
    with made.sampled_parameters(1) as model:
        outcome["in the model"] = model(NEW).detach()
    again = made.release().prepare(x, y, projector=FINE, parallel="parameters")
    outcome["exact"] = again.functional_variance(NEW[:2], exact=True)
    loaded = nb.load(path, made._network.model).prepare(x, y, projector=FINE, parallel="parameters").extend(2)
    outcome["loaded"] = loaded._network.all_columns(loaded.directions)
    outcome |= {
        "apart": refusal(lambda: nb.in_parallel(made.predict, NEW)),
        "exported": refusal(lambda: export(made, NEW[:2])),
        "copied": refusal(lambda: copy.deepcopy(made)),
        "pickled": refusal(lambda: torch.save(made, io.BytesIO())),
        "alone": refusal(lambda: made.prepare(x, y)),
    }
    tuned = made.tune(held_out, (held_out[:, 0] > 0).long())
    outcome["tuned"] = tuned.prior_precision, tuned.temperature
    outcome["memory"] = short_of_memory(rank)
    return outcome | refusals(rank)


def short_of_memory(rank: int) -> dict[str, Any]:
    """A fit and a prediction in which one process runs out of memory once."""
    import nullbayes.posteriors.fitting as fitting
    import nullbayes.predictive.outputs as outputs

    kept, calls = (fitting.build, outputs.sample_outputs), {"build": 0, "predict": 0}

    def once(what: str, work: Any) -> Any:
        def short(*arguments: Any) -> Any:
            calls[what] += 1
            if rank == 1 and calls[what] == 1:
                raise MemoryError
            return work(*arguments)

        return short

    fitting.build, outputs.sample_outputs = once("build", kept[0]), once("predict", kept[1])
    try:
        made = posterior("outputs", n_samples=4, projector=FINE, parallel="parameters")
        samples = made.predict(NEW).samples
    finally:
        fitting.build, outputs.sample_outputs = kept
    return {"calls": calls, "notes": made.report.notes, "samples": samples}


def refusals(rank: int) -> dict[str, str]:
    x, y = data()

    def fit(model: nn.Module | None = None, train: Any = (x, y), **options: Any) -> str:
        made = nb.ProjectedPosterior(network() if model is None else model, prior_precision=1.0)
        return refusal(lambda: made.fit(train, parallel="parameters", progress=False, **options))

    with_nan = x.clone()
    with_nan[3, 0] = torch.nan
    other = network()
    with torch.no_grad():
        other[0].bias += rank
    pairs = TensorDataset(x, y)
    size = torch.distributed.get_world_size()
    sampler = DistributedSampler(pairs, size, rank, shuffle=False)
    made = posterior("outputs", parallel="parameters", projector=FINE)
    return {
        "nan": fit(train=(with_nan if rank else x, y)),
        "nan later": refusal(lambda: made.predict(with_nan if rank else x)),
        "part of the data": fit(train=DataLoader(pairs, batch_size=5, sampler=sampler)),
        "other data": fit(train=(x[rank:], y[rank:])),
        "other network": fit(other),
        "few tensors": fit(nn.Linear(5, 3, bias=False).double()),
        "checkpoint": fit(checkpoint="never"),
        "primal": fit(projector=nb.projectors.ExactPrimal()),
        "Lanczos": fit(projector=nb.projectors.Lanczos(10)),
        "Sketched": fit(projector=nb.projectors.Sketched()),
        "coarse": fit(projector=Krylov(Alternating(coarse=5))),
        "DTensor": refusal(sharded),
        "after": fit(n_samples=2),
    }


def sharded() -> None:
    """A model of FSDP2, and then the same model gathered as the refusal says."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    own, mesh = network(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    expected, model = own.state_dict(), fully_shard(network(), mesh=mesh)
    own.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    assert all(torch.equal(own.state_dict()[name], value) for name, value in expected.items())
    nb.ProjectedPosterior(model)


def planned(rank: int) -> tuple[str, str, str]:
    """What a plan says beforehand, what a fit says afterwards, and the same of processes that divide uneven data."""
    x, y = data()
    with blocks_chosen():
        plan = nb.plan(network(), (x, y), 18, processes=torch.distributed.get_world_size(), parallel="parameters")
        found = posterior("outputs", parallel="parameters").report.reason
        uneven = posterior("outputs", (x[:-1], y[:-1]), parallel="data").report.reason
    return plan.reason, found, uneven
