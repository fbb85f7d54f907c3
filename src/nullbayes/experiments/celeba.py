"""CelebA: a Visual Attention Network that never saw a bald head, eyeglasses or a mustache; Food-101 as strangers.

Every method may hold 300 numbers for each parameter. Its AUROC is that of its own score: the largest variance of a
logit for posteriors, the scores of their authors for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import nullbayes as nb
from nullbayes.experiments import celeba_page
from nullbayes.experiments.folders import CelebA, Images, View, read_celeba, read_food
from nullbayes.experiments.frame import Estimate, Experiment, Missing, Results, Settings
from nullbayes.experiments.streams import (
    Batches,
    Placeholder,
    in_order,
    noted,
    outputs_of,
    pass_seconds,
    shuffled,
    some_steps,
    train,
)
from nullbayes.experiments.van import VAN

HELD_OUT = ("Bald", "Eyeglasses", "Mustache")
_KEPT, _JUDGED = 142_000, 45_000  # about how many images are left for training, and how many are judged
_BYTES = 4  # of a number
_LEAST = 2**30  # bytes: with a small network, what passes through it is more than all of its parameters


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes
    ----------
    pixels : int
        Along a side of an image; the paper does not say how many.
    train, rows, held_out, test : int or None
        At most so many images to train on, to fit methods to, to choose prior precisions by, and of each kind to judge;
        None for all.
    epochs, batch_size, members : int
        Of the training, and how many networks an ensemble has.
    samples, sweeps : int
        Of the posteriors.
    budget : int
        Numbers that a method may hold, as a multiple of the number of parameters.
    rank, sketch : int or None
        Of sketched Lanczos; None for what the budget allows.
    iterates, steps : int
        Of SWAG: how many networks it collects, and how many batches lie between them.
    only : sequence of str or None
        The methods to run, by their names; None for all.
    network : mapping
        Depths, widths and ratios of the network, where they are not those of the paper.
    """

    pixels: int = 64
    train: int | None = None
    rows: int | None = 10_000
    held_out: int | None = 2_000
    test: int | None = None
    epochs: int = 50
    batch_size: int = 128
    members: int = 10
    samples: int = 16
    sweeps: int = 30
    budget: int = 300
    rank: int | None = 1_000
    sketch: int | None = 1_000_000
    iterates: int = 300
    steps: int = 75
    only: Sequence[str] | None = None
    network: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """How images become tensors: the central square, smaller."""
        return View(self.pixels, self.pixels)

    def limit(self, n_parameters: int) -> int:
        """Return the budget in bytes."""
        return max(_LEAST, self.budget * n_parameters * _BYTES)


FULL = Sizes()
QUICK = Sizes(
    pixels=32, train=400, rows=40, held_out=60, test=100, epochs=3, batch_size=32, members=2, samples=8, sweeps=10,
    budget=40, rank=None, sketch=None, iterates=4, steps=4,
    network={"depths": (1, 1, 2, 1), "widths": (8, 16, 24, 32), "ratios": (4, 4, 2, 2)},
)  # fmt: skip


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faces:
    """Images by what they are for; targets are the attributes that the network predicts."""

    train: Images
    held_out: Images
    test: Images
    strangers: Mapping[str, Images]


def read_faces(settings: Settings, sizes: Sizes) -> Faces:
    """Return CelebA without the images of held-out attributes, those images apart, and Food-101.

    Parameters
    ----------
    settings : Settings
        With the folder of the data.
    sizes : Sizes
        How many images to take.
    """
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
    faces = Faces(known, validation, test, strangers)
    _check(faces, found)
    return faces


def _check(faces: Faces, found: CelebA) -> None:
    """Refuse lists without images of some kind, before hours are spent."""
    kinds = {"training": faces.train, "validation": faces.held_out, "test": faces.test, **faces.strangers}
    empty = next((name for name, images in kinds.items() if not len(images)), None)
    if empty is not None:
        msg = f"Among {len(found.split):,} images of CelebA there is none for {empty!r}: fetch the lists again."
        raise Missing(msg)


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """What methods are given."""

    settings: Settings
    sizes: Sizes
    model: nn.Module
    faces: Faces
    fit: Callable[[nn.Module], object]

    @property
    def rows(self) -> Batches:
        return in_order(self.faces.train.some(self.sizes.rows), self.sizes.batch_size)

    @property
    def held_out(self) -> Batches:
        return in_order(self.faces.held_out, self.sizes.batch_size)

    @property
    def n_parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())

    def member(self, seed: int) -> nn.Module:
        settings = self.settings.with_seed(seed)
        return settings.trained(f"seed {self.settings.seed}/member {seed}", lambda: network(self), self.fit)

    def checkpoint(self, name: str) -> str | None:
        """Return where an unfinished projection is kept, beside the finished steps."""
        if self.settings.store is None:
            return None
        folder = self.settings.store.folder / "steps" / f"seed {self.settings.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"{name}.checkpoint")


def network(bench: _Bench) -> nn.Module:
    """Return a new network for the attributes that are not held out."""
    return VAN(bench.faces.train.targets.shape[1], **bench.sizes.network)


def _projected(bench: _Bench, kind: Any, name: str, projector: Any) -> Any:
    limit = bench.sizes.limit(bench.n_parameters)
    return kind(bench.model, "multilabel").fit(
        bench.rows, n_samples=bench.sizes.samples, held_out=bench.held_out, projector=projector, memory_limit=limit,
        checkpoint=bench.checkpoint(name), generator=bench.settings.generator(), progress=False,
    )  # fmt: skip


def _baseline(bench: _Bench, kind: Any, fitting: Mapping[str, Any] | None = None, **own: Any) -> Any:
    arguments = {"n_samples": bench.sizes.samples, **(fitting or {})}
    posterior = kind(bench.model, "multilabel", **own)
    posterior.fit(bench.rows, generator=bench.settings.generator(), progress=False, **arguments)
    if posterior.report.prior_precision is not None and kind is not nb.baselines.MAP:
        posterior.optimize_prior_precision(bench.held_out, "grid")
    return posterior


def methods(bench: _Bench) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return how each method of the paper's table is fitted, and its own score, by the name that it has there."""
    b, sizes, outputs = nb.baselines, bench.sizes, bench.faces.train.targets.shape[1]
    budget: dict[str, Any] = {"memory_budget": sizes.budget}
    swag = {
        "train": some_steps(shuffled(bench.faces.train, sizes.batch_size), sizes.steps, loss),
        "n_models": sizes.iterates, "rank": min(sizes.budget, sizes.iterates),
    }  # fmt: skip
    block = max(1, sizes.budget // 3 // outputs) * outputs  # a third of the numbers for the rows of a block
    krylov = nb.projectors.Krylov(nb.projectors.Alternating(block_rows=block), max_sweeps=sizes.sweeps)
    lanczos = nb.projectors.Lanczos(rank=sizes.budget)
    ours, losses = nb.ProjectedPosterior, nb.LossProjectedPosterior
    return {
        "Max logit": (lambda: _baseline(bench, b.MAP, {"n_samples": 1}), "max_logit"),
        "Deep ensemble": (
            lambda: _baseline(bench, b.DeepEnsemble, {"train": bench.member, "n_samples": sizes.members}),
            "max_variance",
        ),
        "Projected": (lambda: _projected(bench, ours, "Projected", krylov), "max_variance"),
        "Loss-projected": (lambda: _projected(bench, losses, "Loss-projected", "auto"), "max_variance"),
        "Projected, Lanczos": (lambda: _projected(bench, ours, "Projected, Lanczos", lanczos), "max_variance"),
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


def run(settings: Settings, sizes: Sizes | None = None) -> Results:
    """Train the network, fit every method, and tell strangers from faces.

    Parameters
    ----------
    settings : Settings
        What the run is given.
    sizes : Sizes, optional
        How much of everything; by default as ``settings.quick`` says.
    """
    sizes = sizes or (QUICK if settings.quick else FULL)
    faces = read_faces(settings, sizes)
    found: dict[str, list[Results]] = {}
    n_parameters = 0
    for each in settings.each_seed():
        bench = _trained(each, sizes, faces)
        n_parameters = bench.n_parameters
        for name, (fit, score) in methods(bench).items():
            if sizes.only is not None and name not in sizes.only:
                continue
            if name == "Deep ensemble" and each.seed != settings.seed:
                continue  # ten networks are trained once, as in the paper
            done = each.step(f"seed {each.seed}/{name}", lambda b=bench, n=name, f=fit, s=score: _judged(b, n, f, s))  # type: ignore[misc]
            found.setdefault(name, []).append(done)
    images = {"training": faces.train, "rows": faces.train.some(sizes.rows), "validation": faces.held_out}
    counts = {name: len(part) for name, part in {**images, "test": faces.test, **faces.strangers}.items()}
    outputs = faces.train.targets.shape[1]
    kept = {"pixels": sizes.pixels, "epochs": sizes.epochs, "samples": sizes.samples, "sweeps": sizes.sweeps}
    return {
        "quick": settings.quick, "parameters": n_parameters, "outputs": outputs, "images": counts,
        "budget": sizes.budget, "members": sizes.members, **kept, "methods": found,
    }  # fmt: skip


def _trained(settings: Settings, sizes: Sizes, faces: Faces) -> _Bench:
    batches = shuffled(faces.train, sizes.batch_size)

    def fit(model: nn.Module) -> None:
        train(model, batches, sizes.epochs, loss)

    bench = _Bench(settings, sizes, nn.Identity(), faces, fit)
    model = settings.trained(f"seed {settings.seed}/network", lambda: network(bench), fit)
    return replace(bench, model=model)


def _judged(bench: _Bench, name: str, fit: Callable[[], Any], score: str) -> Results:
    """Fit a method and judge it."""
    notes: list[str] = []
    size = bench.sizes.batch_size
    test, strangers = (
        in_order(bench.faces.test, size),
        {kind: in_order(images, size) for kind, images in bench.faces.strangers.items()},
    )
    with noted(notes):
        posterior = fit()
        row = nb.evaluate({name: (posterior, score)}, test, strangers).rows[0]
        auroc = {kind: each.auroc for kind, each in row.strangers.items()}
        if name == "Max logit":  # of a single attribute; the library adds up all that apply
            device = bench.settings.device
            ranks = {kind: _largest(bench.model, part, device) for kind, part in {"": test, **strangers}.items()}
            auroc = {kind: nb.metrics.auroc(ranks[""], ranks[kind]) for kind in strangers}
        calibrated = None
        if name in ("Projected", "Loss-projected"):
            posterior.calibrate(bench.held_out)
            decided = nb.evaluate({name: posterior}, test, strangers).rows[0]
            calibrated = {kind: each.auroc for kind, each in decided.strangers.items()}
    return {
        "score": score, "auroc": auroc, "calibrated": calibrated, "nll": row.nll, "accuracy": row.accuracy,
        "ece": row.ece, "seconds": row.fit_seconds, "memory": row.peak_memory, "notes": sorted(set(notes)),
        "rank": getattr(posterior.report, "rank", None), "precision": posterior.report.prior_precision,
    }  # fmt: skip


def _largest(model: nn.Module, batches: Batches, device: torch.device) -> torch.Tensor:
    """Return minus the largest logit of each image."""
    with torch.no_grad():
        (logits, _) = outputs_of(lambda x: (model(x),), batches, device)
    return -logits.amax(1)  # type: ignore[no-any-return]


# --- what it takes ----------------------------------------------------------------------------------------------------


def estimate(settings: Settings, sizes: Sizes | None = None) -> Estimate:
    """Say what a run takes, from the time of one pass of the network and the plan of the loss-projected fit.

    Parameters
    ----------
    settings : Settings
        What the run would be given.
    sizes : Sizes, optional
        How much of everything; by default as ``settings.quick`` says.
    """
    sizes = sizes or (QUICK if settings.quick else FULL)
    outputs, model = 37, VAN(**sizes.network).to(settings.device).eval()
    n_parameters = sum(weight.numel() for weight in model.parameters())
    n_train, n_test = sizes.train or _KEPT, 5 * sizes.test if sizes.test else _JUDGED
    n_rows = min(sizes.rows or n_train, n_train)
    limit = sizes.limit(n_parameters)
    seconds = pass_seconds(model, sizes.pixels, settings.device)
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
        memory=max(3 * limit, plan.peak_bytes),
        disk=(settings.seeds + sizes.members) * n_parameters * _BYTES,
        note=(
            f"{outputs * n_rows:,} rows of outputs and {n_rows:,} of losses over {n_parameters:,} parameters; about "
            f"{passes:.1g} passes of one image through the network, each {seconds:.2g} s as measured now, and "
            f"{plan.seconds:.2g} s for a loss-projected fit as nb.plan says; reading images is not counted"
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
        estimate=estimate,
        run=run,
        page=celeba_page.page,
    )
}
