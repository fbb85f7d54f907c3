"""ImageNet: the loss-projected posterior of a published Swin-T, with Places365 as strangers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.experiments import imagenet_page
from nullbayes.experiments.datasets import WHERE
from nullbayes.experiments.folders import Images, View, read_imagenet, read_places
from nullbayes.experiments.frame import Estimate, Experiment, Missing, Results, Settings
from nullbayes.experiments.streams import Batches, in_order, noted, outputs_of, pass_seconds
from nullbayes.experiments.swin import Swin, load_weights

_WEIGHTS = (
    "swin_tiny_patch4_window7_224.pth", "swin_tiny_patch4_window7_224.safetensors",
    "swin-tiny-patch4-window7-224/model.safetensors",
)  # fmt: skip
_IMAGES = {"train": 1_281_167, "test": 50_000, "strangers": 36_500}
_BYTES = 4  # of a number
_HELD = 2**32  # bytes of rows that are likely to be held
_VECTORS = 10  # of the size of the parameters that a projection holds for each sample


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

    Attributes
    ----------
    pixels, shorter : int
        Along a side of the central square that the network sees, and along the shorter side of an image before.
    rows, test, strangers : int or None
        At most so many training images whose losses are kept, validation images, and strangers; None for all.
    held_out : int
        Validation images to choose the prior precision by and to calibrate on, which are then not judged.
    samples, sweeps, block : int
        Of the posterior, of its projection, and how many images the latter takes at a time.
    batch_size : int
        Images that are read and predicted together.
    parameters : sequence of str or None
        Which vary; None for all.
    network : mapping
        Sizes of the network, where they are not those of Swin-T.
    """

    pixels: int = 224
    shorter: int = 256
    rows: int | None = None
    test: int | None = None
    strangers: int | None = None
    held_out: int = 2_000
    samples: int = 5
    sweeps: int = 15
    block: int = 128
    batch_size: int = 64
    parameters: Sequence[str] | None = None
    network: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """How images become tensors."""
        return View(self.pixels, self.shorter)


FULL = Sizes()
QUICK = Sizes(rows=100, test=100, strangers=60, held_out=50, batch_size=16, parameters=("norm.*", "head.*"))


# --- network and data -------------------------------------------------------------------------------------------------


def published(settings: Settings, sizes: Sizes) -> nn.Module:
    """Return the network with its published weights.

    Parameters
    ----------
    settings : Settings
        With the folder of the data, in which ``weights`` is.
    sizes : Sizes
        With the sizes of the network.
    """
    model = Swin(image=sizes.pixels, **sizes.network)
    folder = settings.data or Path()
    for name in _WEIGHTS:
        if settings.data is not None and (folder / "weights" / name).is_file():
            return load_weights(model, folder / "weights" / name).to(settings.device)
    msg = f"This needs weights/{_WEIGHTS[0]}, which the authors of the network publish: {WHERE}."
    raise Missing(msg)


@dataclass(frozen=True)
class Photographs:
    """Images by what they are for."""

    rows: Images
    held_out: Images
    test: Images
    strangers: Images


def read_photographs(settings: Settings, sizes: Sizes) -> Photographs:
    """Return training images, validation images in two parts, and strangers.

    Parameters
    ----------
    settings : Settings
        With the folder of the data.
    sizes : Sizes
        How many images to take.
    """
    view = sizes.view
    new = read_imagenet(settings.data, "val", view)
    if len(new) <= sizes.held_out:
        msg = f"imagenet/val has {len(new):,} images, and {sizes.held_out:,} are held out: unpack all of them."
        raise Missing(msg)
    order = torch.randperm(len(new), generator=torch.Generator().manual_seed(0))
    judged = order[sizes.held_out :]
    judged = judged if sizes.test is None else judged[: sizes.test]
    return Photographs(
        rows=read_imagenet(settings.data, "train", view).some(sizes.rows),
        held_out=new.where(order[: sizes.held_out].sort().values),
        test=new.where(judged.sort().values),
        strangers=read_places(settings.data, view).some(sizes.strangers),
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes | None = None) -> Results:
    """Fit the posterior, and judge it beside the network.

    Parameters
    ----------
    settings : Settings
        What the run is given.
    sizes : Sizes, optional
        How much of everything; by default as ``settings.quick`` says.
    """
    sizes = sizes or (QUICK if settings.quick else FULL)
    model, photographs = published(settings, sizes), read_photographs(settings, sizes)
    parts = {name: in_order(images, sizes.batch_size) for name, images in vars(photographs).items()}
    network = settings.step("network", lambda: _network(model, parts, settings.device))
    posteriors = [
        each.step(f"seed {each.seed}/loss-projected", lambda s=each: _posterior(s, sizes, model, parts))  # type: ignore[misc]
        for each in settings.each_seed()
    ]
    return {
        "quick": settings.quick, "parameters": sum(weight.numel() for weight in model.parameters()),
        "varied": list(sizes.parameters or ()), "images": {name: len(part) for name, part in vars(photographs).items()},
        "samples": sizes.samples, "sweeps": sizes.sweeps, "block": sizes.block, "pixels": sizes.pixels,
        "methods": {"MAP": [network], "Loss-projected": posteriors},
    }  # fmt: skip


def _network(model: nn.Module, parts: Mapping[str, Batches], device: torch.device) -> Results:
    """Judge the network by its own probabilities."""

    def answer(x: Tensor) -> tuple[Tensor, ...]:
        probs = model(x).double().softmax(1)
        return probs, 1 - probs.amax(1)

    with torch.no_grad():
        return _judged(answer, ("max_probability",), parts, device)


def _posterior(settings: Settings, sizes: Sizes, model: nn.Module, parts: Mapping[str, Batches]) -> Results:
    """Fit the posterior and judge it."""
    notes: list[str] = []
    blocks = nb.projectors.Alternating(block_rows=sizes.block)
    posterior = nb.LossProjectedPosterior(model, parameters=sizes.parameters)

    def answer(x: Tensor) -> tuple[Tensor, ...]:
        prediction = posterior.predict(x)
        assert prediction.probs is not None
        probs = prediction.probs.double()
        return probs, prediction.variance.amax(1), 1 - probs.amax(1)

    with noted(notes):
        posterior.fit(
            parts["rows"], n_samples=sizes.samples, held_out=parts["held_out"],
            projector=nb.projectors.Krylov(blocks, rtol=2e-2, max_sweeps=sizes.sweeps),
            checkpoint=_checkpoint(settings), generator=settings.generator(), progress=False,
        )  # fmt: skip
        found = _judged(answer, ("max_variance", "max_probability"), parts, settings.device)
        posterior.calibrate(parts["held_out"])
        strangers = {"Places365": parts["strangers"]}
        calibrated = nb.evaluate({"posterior": posterior}, parts["test"], strangers).rows[0].strangers["Places365"]
    report = posterior.report
    cost = {"seconds": sum(report.seconds.values()), "memory": report.peak_memory, "precision": report.prior_precision}
    found["auroc"]["calibrated"] = calibrated.auroc
    return {**found, **cost, "residual": max(report.residual), "notes": sorted(set(notes))}


def _checkpoint(settings: Settings) -> Path | None:
    """Return where an unfinished projection is kept, beside the finished steps."""
    if settings.store is None:
        return None
    folder = settings.store.folder / "steps" / f"seed {settings.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "loss-projected.checkpoint"


def _judged(
    answer: Callable[[Tensor], tuple[Tensor, ...]],
    scores: Sequence[str],
    parts: Mapping[str, Batches],
    device: torch.device,
) -> Results:
    """Return the figures of probabilities, and how well each score behind them tells strangers."""
    probs, *known, targets = outputs_of(answer, parts["test"], device)
    _, *strange, _ = outputs_of(answer, parts["strangers"], device)
    m = nb.metrics
    figures = {name: getattr(m, name)(probs, targets) for name in ("nll", "accuracy", "brier", "ece", "mce")}
    auroc = {name: m.auroc(a, b) for name, a, b in zip(scores, known, strange, strict=True)}
    return {"confidence": m.confidence(probs, targets), **figures, "auroc": auroc}


# --- what it takes ----------------------------------------------------------------------------------------------------


def estimate(settings: Settings, sizes: Sizes | None = None) -> Estimate:
    """Say what a run takes, from the time of one pass of the network and a count of passes.

    Parameters
    ----------
    settings : Settings
        What the run would be given.
    sizes : Sizes, optional
        How much of everything; by default as ``settings.quick`` says.
    """
    sizes = sizes or (QUICK if settings.quick else FULL)
    model = Swin(image=sizes.pixels, **sizes.network).to(settings.device).eval()
    seconds = pass_seconds(model, sizes.pixels, settings.device)
    wanted = ("*",) if sizes.parameters is None else sizes.parameters
    varied = sum(w.numel() for name, w in model.named_parameters() if any(fnmatch(name, glob) for glob in wanted))
    n_rows, test = sizes.rows or _IMAGES["train"], sizes.test or _IMAGES["test"]
    judged = test + (sizes.strangers or _IMAGES["strangers"])
    share = varied / sum(w.numel() for w in model.parameters())  # of the way back that is gone
    again = 0 if n_rows * varied * _BYTES < _HELD else sizes.sweeps  # rows that are not held are formed in every sweep
    projection = (again + 5) * n_rows
    predictions = 2 * (1 + share * sizes.samples) * (judged + 4 * sizes.held_out)
    passes = (1 + 2 * share) / 3 * (settings.seeds * (projection + predictions) + judged)
    block = min(sizes.block, n_rows)
    numbers = _VECTORS * sizes.samples * varied + 2 * block * varied + n_rows * block
    return Estimate(
        seconds=seconds * passes,
        memory=_BYTES * numbers,
        disk=2 * _VECTORS * sizes.samples * varied * _BYTES,
        note=(
            f"{n_rows:,} rows over {varied:,} parameters; about {passes:.1g} passes of one image through the network, "
            f"each {seconds:.2g} s as measured now; reading images, which every sweep does again, is not counted"
        ),
    )


EXPERIMENTS = {
    "imagenet": Experiment(
        name="imagenet",
        about="The loss-projected posterior of a Swin-T on ImageNet, beside the network, with Places365 as strangers.",
        needs=("imagenet", "places365", "weights", "pillow"),
        estimate=estimate,
        run=run,
        page=imagenet_page.page,
    )
}
