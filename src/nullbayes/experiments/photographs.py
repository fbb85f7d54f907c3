"""What the experiments on CelebA and ImageNet share: sizes, images by what they are for, and steps of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import nullbayes as nb
from nullbayes.experiments.folders import Images, View
from nullbayes.experiments.frame import FAILURES, Results, Settings, failure
from nullbayes.experiments.streams import Batches, in_order, noted

BYTES = 4  # of a number
VECTORS = 10  # of the size of the parameters that a projection holds for each sample


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """How much of everything.

    Attributes
    ----------
    pixels, shorter : int
        Along a side of the central square that the network sees, and along the shorter side of an image before.
    rows, held_out, test : int or None
        At most so many images to fit methods to, to choose prior precisions by and to calibrate on, and of each kind to
        judge; None for all.
    samples, sweeps : int
        Of the posteriors and their projections.
    batch_size : int
        Images that are read together.
    network : mapping
        Sizes of the network, where they are not those of the paper.
    """

    pixels: int
    shorter: int
    rows: int | None
    held_out: int | None
    test: int | None
    samples: int
    sweeps: int
    batch_size: int
    network: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """How images become tensors."""
        return View(self.pixels, self.shorter)


@dataclass(frozen=True)
class Parts:
    """Images by what they are for; ``rows`` are those training images that methods are fitted to."""

    training: Images
    rows: Images
    validation: Images
    test: Images
    strangers: Mapping[str, Images]

    def named(self) -> dict[str, Images]:
        """Return all of them by their names."""
        sets = {name: part for name, part in vars(self).items() if name != "strangers"}
        return {**sets, **self.strangers}


@dataclass(frozen=True)
class Bench:
    """A network, its images in batches, and what methods on it share."""

    settings: Settings
    sizes: Any
    model: nn.Module
    parts: Parts

    def batches(self, part: str) -> Batches:
        """Return images in their order, by the name of a part or of strangers."""
        return in_order(self.parts.named()[part], self.sizes.batch_size)

    def strangers(self) -> dict[str, Batches]:
        """Return the strangers of every kind."""
        return {kind: self.batches(kind) for kind in self.parts.strangers}

    def projected(self, posterior: Any, name: str, **options: Any) -> Any:
        """Fit a projected posterior; an unfinished projection is kept beside the finished steps."""
        checkpoint = None
        if self.settings.store is not None:
            checkpoint = self.settings.store.folder / "steps" / f"seed {self.settings.seed}" / f"{name}.checkpoint"
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
        return posterior.fit(
            self.batches("rows"), n_samples=self.sizes.samples, held_out=self.batches("validation"),
            checkpoint=checkpoint, generator=self.settings.generator(), progress=False, **options,
        )  # fmt: skip

    def calibrated(self, posterior: Any) -> dict[str, float]:
        """Calibrate a posterior, and return the AUROC of what it then decides by, for every kind of strangers."""
        posterior.calibrate(self.batches("validation"))
        found = nb.evaluate({"posterior": posterior}, self.batches("test"), self.strangers()).rows[0].strangers
        return {kind: each.auroc for kind, each in found.items()}


def each_method(
    settings: Settings,
    methods: Callable[[Settings], Mapping[str, Callable[[], Results]]],
    *,
    only: Sequence[str] | None = None,
    once: str = "",
) -> dict[str, list[Results]]:
    """Do one step per seed and method; return what they gave by the name of the method, a list over the seeds.

    ``methods`` returns for the settings of a seed what is to be done for each. What the library warns of meanwhile is
    kept as ``notes``; a method that cannot be fitted says why. The method ``once`` runs for the first seed alone.
    """
    found: dict[str, list[Results]] = {}
    for own in settings.each_seed():
        for name, work in methods(own).items():
            if (only is None or name in only) and (name != once or own.seed == settings.seed):
                step = own.step(f"seed {own.seed}/{name}", lambda work=work: _attempted(work))  # type: ignore[misc]
                found.setdefault(name, []).append(step)
    return found


def _attempted(work: Callable[[], Results]) -> Results:
    notes: list[str] = []
    try:
        with noted(notes):
            done = work()
    except FAILURES as error:
        return failure(error)
    return {**done, "notes": sorted(set(notes))}


def costs(report: Any) -> Results:
    """Return what a fit took and found."""
    residual = getattr(report, "residual", None)
    return {
        "seconds": sum(report.seconds.values()), "memory": report.peak_memory, "precision": report.prior_precision,
        "rank": getattr(report, "rank", None), "residual": max(residual) if residual else None,
    }  # fmt: skip


def described(settings: Settings, sizes: ImageSizes, model: nn.Module, parts: Parts) -> Results:
    """Return what a page says about a run beside its figures."""
    return {
        "quick": settings.quick, "parameters": size(model), "pixels": sizes.pixels, "samples": sizes.samples,
        "sweeps": sizes.sweeps, "images": {name: len(part) for name, part in parts.named().items()},
    }  # fmt: skip


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(weight.numel() for weight in model.parameters())


def passes_note(passes: float, seconds: float) -> str:
    """Return what an estimate of a run rests on."""
    return (
        f"about {passes:.1g} passes of one image through the network and back, each {seconds:.2g} s as measured now on "
        "this device; reading images is not counted"
    )


def batch_bytes(sizes: ImageSizes, kept: int) -> int:
    """Return what a batch takes on its way through the network: what is kept of each image, and derivatives of it."""
    return 3 * sizes.batch_size * kept


def checkpoint_bytes(sizes: ImageSizes, varied: int) -> int:
    """Return what an unfinished projection takes on the disk, where the next state is written beside the last."""
    return 2 * VECTORS * sizes.samples * varied * BYTES
