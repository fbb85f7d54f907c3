"""CelebA: a Visual Attention Network that never saw a bald head, eyeglasses or a mustache; Food-101 as strangers.

Every method may hold 300 numbers for each parameter. Its AUROC is that of its own score: the largest variance of a
logit for posteriors, the scores of their authors for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import nullbayes as nb
from nullbayes.experiments import celeba_page, photographs, streams
from nullbayes.experiments.folders import read_celeba, read_food
from nullbayes.experiments.frame import Estimate, Experiment, Missing, Results, Settings, sized
from nullbayes.experiments.photographs import Bench, ImageSizes, Parts
from nullbayes.experiments.streams import Batches, Placeholder, in_order, outputs_of, pass_cost, shuffled, some_steps
from nullbayes.experiments.van import VAN

HELD_OUT = ("Bald", "Eyeglasses", "Mustache")
_KEPT, _JUDGED = 142_000, 45_000  # about how many images are left for training, and how many are judged
_COPIES = 3  # a baseline computes with copies of what it holds
_LEAST = 2**30  # bytes: with a small network, what passes through it is more than all of its parameters


@dataclass(frozen=True, kw_only=True)
class Sizes(ImageSizes):
    """How much of everything.

    Attributes
    ----------
    train : int or None
        At most so many images to train on; None for all.
    epochs, members : int
        Of the training, and how many networks an ensemble has.
    budget : int
        Numbers that a method may hold, as a multiple of the number of parameters.
    rank, sketch : int or None
        Of sketched Lanczos; None for what the budget allows.
    iterates, steps : int
        Of SWAG: how many networks it collects, and how many batches lie between them.
    only : sequence of str or None
        The methods to run, by their names; None for all.
    """

    train: int | None
    epochs: int
    members: int
    budget: int
    rank: int | None
    sketch: int | None
    iterates: int
    steps: int
    only: Sequence[str] | None = None

    def limit(self, n_parameters: int) -> int:
        """Return the budget in bytes."""
        return max(_LEAST, self.budget * n_parameters * photographs.BYTES)


FULL = Sizes(
    pixels=64, shorter=64, train=None, rows=10_000, held_out=2_000, test=None, epochs=50, batch_size=128, members=10,
    samples=16, sweeps=30, budget=300, rank=1_000, sketch=1_000_000, iterates=300, steps=75,
)  # fmt: skip  # the paper does not say how many pixels
QUICK = Sizes(
    pixels=32, shorter=32, train=400, rows=40, held_out=60, test=100, epochs=3, batch_size=32, members=2, samples=8,
    sweeps=10, budget=40, rank=None, sketch=None, iterates=4, steps=4,
    network={"depths": (1, 1, 2, 1), "widths": (8, 16, 24, 32), "ratios": (4, 4, 2, 2)},
)  # fmt: skip


# --- data -------------------------------------------------------------------------------------------------------------


def read_faces(settings: Settings, sizes: Sizes) -> Parts:
    """Return CelebA without the images of held-out attributes, those images apart, and Food-101."""
    found = read_celeba(settings.data, sizes.view)
    missing = [name for name in HELD_OUT if name not in found.attributes]
    if missing:
        msg = f"list_attr_celeba.txt has no attribute {missing[0]}: fetch it again."
        raise Missing(msg)
    predicted = [i for i, name in enumerate(found.attributes) if name not in HELD_OUT]
    images = replace(found.images, targets=found.images.targets[:, predicted])
    odd = torch.stack([found.has(name) for name in HELD_OUT])
    familiar, alone = ~odd.any(0), odd.sum(0) == 1
    strangers = {"Food-101": read_food(settings.data, sizes.view).some(sizes.test)}
    for name, has in zip(HELD_OUT, odd, strict=True):
        strangers[f"{name} only"] = images.where((found.split == 2) & has & alone).some(sizes.test)
    kept = ((0, sizes.train), (1, sizes.held_out), (2, sizes.test))
    known, validation, test = (images.where((found.split == part) & familiar).some(most) for part, most in kept)
    faces = Parts(known, known.some(sizes.rows), validation, test, strangers)
    empty = next((name for name, part in faces.named().items() if not len(part)), None)
    if empty is not None:
        msg = f"Among {len(found.split):,} images of CelebA there is none for {empty!r}: fetch the lists again."
        raise Missing(msg)
    return faces


# --- methods ----------------------------------------------------------------------------------------------------------


def _trained(settings: Settings, sizes: Sizes, faces: Parts, key: str = "network") -> nn.Module:
    """Return a network that predicts the attributes which are not held out."""

    def fit(model: nn.Module) -> None:
        streams.train(model, shuffled(faces.training, sizes.batch_size), sizes.epochs, loss)

    return settings.trained(f"seed {settings.seed}/{key}", lambda: _network(sizes, faces), fit)


def _network(sizes: Sizes, faces: Parts) -> nn.Module:
    return VAN(faces.training.targets.shape[1], **sizes.network)


def _baseline(bench: Bench, kind: Any, fitting: Mapping[str, Any] | None = None, **own: Any) -> Any:
    limit = _COPIES * bench.sizes.limit(photographs.size(bench.model))
    arguments = {"n_samples": bench.sizes.samples, "memory_limit": limit, **(fitting or {})}
    posterior = kind(bench.model, "multilabel", **own)
    posterior.fit(bench.batches("rows"), generator=bench.settings.generator(), progress=False, **arguments)
    if posterior.report.prior_precision is not None and kind is not nb.baselines.MAP:
        posterior.optimize_prior_precision(bench.batches("validation"), "grid")
    return posterior


def methods(bench: Bench) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return how each method of the paper's table is fitted, and its own score, by the name that it has there."""
    b, sizes, faces = nb.baselines, bench.sizes, bench.parts
    outputs = faces.training.targets.shape[1]
    budget: dict[str, Any] = {"memory_budget": sizes.budget}
    swag = {
        "train": some_steps(shuffled(faces.training, sizes.batch_size), sizes.steps, loss),
        "n_models": sizes.iterates, "rank": min(sizes.budget, sizes.iterates),
    }  # fmt: skip
    block = max(1, sizes.budget // 3 // outputs) * outputs  # a third of the numbers for the rows of a block
    krylov = nb.projectors.Krylov(nb.projectors.Alternating(block_rows=block), max_sweeps=sizes.sweeps)
    lanczos = nb.projectors.Lanczos(rank=sizes.budget)

    def projected(name: str, kind: Any, projector: Any) -> tuple[Callable[[], Any], str]:
        options = {"projector": projector, "memory_limit": sizes.limit(photographs.size(bench.model))}
        return lambda: bench.projected(kind(bench.model, "multilabel"), name, **options), "max_variance"

    def member(seed: int) -> nn.Module:
        return _trained(bench.settings.with_seed(seed), sizes, faces, f"member of {bench.settings.seed}")

    return {
        "Max logit": (lambda: _baseline(bench, b.MAP, {"n_samples": 1}), "max_logit"),
        "Deep ensemble": (
            lambda: _baseline(bench, b.DeepEnsemble, {"train": member, "n_samples": sizes.members}),
            "max_variance",
        ),
        "Projected": projected("Projected", nb.ProjectedPosterior, krylov),
        "Loss-projected": projected("Loss-projected", nb.LossProjectedPosterior, "auto"),
        "Projected, Lanczos": projected("Projected, Lanczos", nb.ProjectedPosterior, lanczos),
        "Local ensemble": (lambda: _baseline(bench, b.LocalEnsemble, **budget), "local_ensemble"),
        "LLA": (lambda: _baseline(bench, b.LanczosLaplace, **budget), "max_variance"),
        "LLA, diagonal": (lambda: _baseline(bench, b.DiagonalLaplace), "max_variance"),
        "SCOD": (lambda: _baseline(bench, b.SCOD, **budget), "scod"),
        "SWAG": (lambda: _baseline(bench, b.SWAG, swag), "max_variance"),
        "SLU": (
            lambda: _baseline(bench, b.SketchedLanczos, rank=sizes.rank, sketch_size=sizes.sketch, **budget),
            "sketched_lanczos",
        ),
    }


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of all attributes."""
    return binary_cross_entropy_with_logits(outputs, targets)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes) -> Results:
    """Train the network, fit every method, and tell strangers from faces."""
    faces = read_faces(settings, sizes)

    def works(own: Settings) -> dict[str, Callable[[], Results]]:
        bench = Bench(own, sizes, _trained(own, sizes, faces), faces)
        return {name: partial(_judged, bench, name, *how) for name, how in methods(bench).items()}

    return {
        **photographs.described(settings, sizes, _network(sizes, faces), faces), "epochs": sizes.epochs,
        "outputs": faces.training.targets.shape[1], "budget": sizes.budget, "members": sizes.members,
        "methods": photographs.each_method(settings, works, only=sizes.only, once="Deep ensemble"),  # as in the paper
    }  # fmt: skip


def _judged(bench: Bench, name: str, fit: Callable[[], Any], score: str) -> Results:
    """Fit a method and judge it."""
    test, strangers, posterior = bench.batches("test"), bench.strangers(), fit()
    row = nb.evaluate({name: (posterior, score)}, test, strangers).rows[0]
    auroc = {kind: each.auroc for kind, each in row.strangers.items()}
    if name == "Max logit":  # of a single attribute; the library adds up all that apply
        device = bench.settings.device
        ranks = {kind: _largest(bench.model, part, device) for kind, part in {"": test, **strangers}.items()}
        auroc = {kind: nb.metrics.auroc(ranks[""], ranks[kind]) for kind in strangers}
    return {
        "score": score, "auroc": auroc, "nll": row.nll, "accuracy": row.accuracy, "ece": row.ece,
        "calibrated": bench.calibrated(posterior) if name in ("Projected", "Loss-projected") else None,
        **photographs.costs(posterior.report),
    }  # fmt: skip


def _largest(model: nn.Module, batches: Batches, device: torch.device) -> torch.Tensor:
    """Return minus the largest logit of each image."""
    with torch.no_grad():
        (logits, _) = outputs_of(lambda x: (model(x),), batches, device)
    return -logits.amax(1)  # type: ignore[no-any-return]


# --- what it takes ----------------------------------------------------------------------------------------------------


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes, from the time of one pass of the network and the plan of the loss-projected fit."""
    outputs, model = 37, VAN(**sizes.network).to(settings.device).eval()
    n_parameters = photographs.size(model)
    n_train, n_test = sizes.train or _KEPT, 5 * sizes.test if sizes.test else _JUDGED
    n_rows = min(sizes.rows or n_train, n_train)
    limit, held = sizes.limit(n_parameters), sizes.budget * n_parameters  # a method works on what it holds
    seconds, kept = pass_cost(model, sizes.pixels, settings.device)
    placeholders = in_order(Placeholder(n_rows, sizes.pixels, torch.ones(outputs)), 8)
    plan = nb.plan(model, placeholders, sizes.samples, limit, likelihood="multilabel", loss=True)
    products = 3 * sizes.budget + (sizes.rank or 3 * sizes.budget)  # of the four methods with a Lanczos process
    each = {
        "training": sizes.epochs * n_train + sizes.iterates * sizes.steps * sizes.batch_size,
        "projection": (sizes.sweeps + 3) * n_rows * outputs,
        "curvature": 2 * products * n_rows + 2 * outputs * n_rows,
        "judging": n_test * (8 * sizes.samples + 3 * outputs),
    }
    passes = settings.seeds * sum(each.values()) + sizes.members * sizes.epochs * n_train
    return Estimate(
        seconds=seconds * passes + settings.seeds * plan.seconds,
        memory=max(limit, _COPIES * held * photographs.BYTES, plan.peak_bytes) + photographs.batch_bytes(sizes, kept),
        disk=(settings.seeds + sizes.members) * n_parameters * photographs.BYTES
        + photographs.checkpoint_bytes(sizes, n_parameters),
        note=(
            f"{outputs * n_rows:,} rows of outputs and {n_rows:,} of losses over {n_parameters:,} parameters; "
            f"{plan.seconds:.2g} s for a loss-projected fit as nb.plan says, and "
            f"{photographs.passes_note(passes, seconds)}"
        ),
    )


EXPERIMENTS = {
    "celeba": Experiment(
        name="celeba",
        about=(
            "A Visual Attention Network on CelebA without three attributes: which method finds them, and food, strange "
            "within 300 numbers per parameter."
        ),
        needs=("celeba", "food-101", "pillow"),
        estimate=sized(estimate, FULL, QUICK),
        run=sized(run, FULL, QUICK),
        page=celeba_page.page,
    )
}
