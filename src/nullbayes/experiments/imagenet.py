"""ImageNet: the loss-projected posterior of a published Swin-T, with Places365 as strangers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.experiments import imagenet_page, photographs
from nullbayes.experiments.datasets import WHERE
from nullbayes.experiments.folders import read_imagenet, read_places
from nullbayes.experiments.frame import Estimate, Experiment, Missing, Results, Settings, sized
from nullbayes.experiments.photographs import Bench, ImageSizes, Parts
from nullbayes.experiments.streams import outputs_of, pass_cost
from nullbayes.experiments.swin import Swin, load_weights

_WEIGHTS = (
    "swin_tiny_patch4_window7_224.pth", "swin_tiny_patch4_window7_224.safetensors",
    "swin-tiny-patch4-window7-224/model.safetensors",
)  # fmt: skip
_IMAGES = {"train": 1_281_167, "test": 50_000, "strangers": 36_500}
_HELD = 2**32  # bytes of rows that are likely to be held


@dataclass(frozen=True, kw_only=True)
class Sizes(ImageSizes):
    """How much of everything; validation images that are held out are not judged.

    Attributes
    ----------
    block : int
        How many images the projection takes at a time.
    parameters : sequence of str or None
        Which vary; None for all.
    """

    held_out: int
    block: int = 128
    parameters: Sequence[str] | None = None


FULL = Sizes(pixels=224, shorter=256, rows=None, held_out=2_000, test=None, samples=5, sweeps=15, batch_size=64)
QUICK = replace(FULL, rows=40, held_out=40, test=30, batch_size=16, parameters=("norm.*", "head.*"))


# --- network and data -------------------------------------------------------------------------------------------------


def published(settings: Settings, sizes: Sizes) -> nn.Module:
    """Return the network with its published weights, which are in ``weights`` of the data folder."""
    model = Swin(image=sizes.pixels, **sizes.network)
    folder = settings.data or Path()
    for name in _WEIGHTS:
        if settings.data is not None and (folder / "weights" / name).is_file():
            return load_weights(model, folder / "weights" / name).to(settings.device)
    msg = f"This needs weights/{_WEIGHTS[0]}, which the authors of the network publish: {WHERE}."
    raise Missing(msg)


def read_photographs(settings: Settings, sizes: Sizes) -> Parts:
    """Return training images, validation images in two parts, and strangers."""
    view = sizes.view
    new = read_imagenet(settings.data, "val", view)
    if len(new) <= sizes.held_out:
        msg = f"imagenet/val has {len(new):,} images, and {sizes.held_out:,} are held out: unpack all of them."
        raise Missing(msg)
    order = torch.randperm(len(new), generator=torch.Generator().manual_seed(0))
    training = read_imagenet(settings.data, "train", view)
    return Parts(
        training=training,
        rows=training.some(sizes.rows),
        validation=new.where(order[: sizes.held_out].sort().values),
        test=new.where(order[sizes.held_out :][: sizes.test].sort().values),
        strangers={"Places365": read_places(settings.data, view).some(sizes.test)},
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes) -> Results:
    """Fit the posterior, and judge it beside the network."""
    model, parts = published(settings, sizes), read_photographs(settings, sizes)

    def works(own: Settings) -> dict[str, Callable[[], Results]]:
        bench = Bench(own, sizes, model, parts)
        return {"MAP": partial(_network, bench), "Loss-projected": partial(_posterior, bench)}

    return {
        **photographs.described(settings, sizes, model, parts),
        "varied": list(sizes.parameters or ()), "block": sizes.block,
        "methods": photographs.each_method(settings, works, once="MAP"),
    }  # fmt: skip


def _network(bench: Bench) -> Results:
    """Judge the network by its own probabilities."""

    def answer(x: Tensor) -> tuple[Tensor, ...]:
        probs = bench.model(x).double().softmax(1)
        return probs, 1 - probs.amax(1)

    with torch.no_grad():
        return _judged(answer, ("max_probability",), bench)


def _posterior(bench: Bench) -> Results:
    """Fit the posterior and judge it."""
    blocks = nb.projectors.Alternating(block_rows=bench.sizes.block)
    krylov = nb.projectors.Krylov(blocks, rtol=2e-2, max_sweeps=bench.sizes.sweeps)
    posterior = nb.LossProjectedPosterior(bench.model, parameters=bench.sizes.parameters)

    def answer(x: Tensor) -> tuple[Tensor, ...]:
        prediction = posterior.predict(x)
        assert prediction.probs is not None
        probs = prediction.probs.double()
        return probs, prediction.variance.amax(1), 1 - probs.amax(1)

    bench.projected(posterior, "Loss-projected", projector=krylov)
    found = _judged(answer, ("max_variance", "max_probability"), bench)
    found["auroc"]["calibrated"] = bench.calibrated(posterior)["Places365"]
    return {**found, **photographs.costs(posterior.report)}


def _judged(answer: Callable[[Tensor], tuple[Tensor, ...]], scores: Sequence[str], bench: Bench) -> Results:
    """Return the figures of probabilities, and how well each score behind them tells strangers."""
    device, m = bench.settings.device, nb.metrics
    probs, *known, targets = outputs_of(answer, bench.batches("test"), device)
    _, *strange, _ = outputs_of(answer, bench.batches("Places365"), device)
    figures = {name: getattr(m, name)(probs, targets) for name in ("nll", "accuracy", "brier", "ece", "mce")}
    auroc = {name: m.auroc(a, b) for name, a, b in zip(scores, known, strange, strict=True)}
    return {"confidence": m.confidence(probs, targets), **figures, "auroc": auroc}


# --- what it takes ----------------------------------------------------------------------------------------------------


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes, from the time of one pass of the network and a count of passes."""
    model = Swin(image=sizes.pixels, **sizes.network).to(settings.device).eval()
    seconds, kept = pass_cost(model, sizes.pixels, settings.device)
    wanted = ("*",) if sizes.parameters is None else sizes.parameters
    varied = sum(w.numel() for name, w in model.named_parameters() if any(fnmatch(name, glob) for glob in wanted))
    n_rows, test = sizes.rows or _IMAGES["train"], sizes.test or _IMAGES["test"]
    judged = test + (sizes.test or _IMAGES["strangers"])
    share = varied / photographs.size(model)  # of the way back that is gone
    again = (
        0 if n_rows * varied * photographs.BYTES < _HELD else sizes.sweeps
    )  # rows that are not held are formed in every sweep
    projection = (again + 5) * n_rows
    asked = 3 * judged + 8 * sizes.held_out  # for probabilities, scores and decisions; strangers are made of the latter
    predictions = 2 * (1 + share * sizes.samples) * asked
    passes = (1 + 2 * share) / 3 * (settings.seeds * (projection + predictions) + judged)
    block = min(sizes.block, n_rows)
    numbers = photographs.VECTORS * sizes.samples * varied + 2 * block * varied + n_rows * block
    return Estimate(
        seconds=seconds * passes,
        memory=photographs.BYTES * numbers + photographs.batch_bytes(sizes, kept),
        disk=photographs.checkpoint_bytes(sizes, varied),
        note=(
            f"{n_rows:,} rows over {varied:,} parameters; {photographs.passes_note(passes, seconds)}, though "
            "every sweep does it again"
        ),
    )


EXPERIMENTS = {
    "imagenet": Experiment(
        name="imagenet",
        about="The loss-projected posterior of a Swin-T on ImageNet, beside the network, with Places365 as strangers.",
        needs=("imagenet", "places365", "weights", "pillow"),
        estimate=sized(estimate, FULL, QUICK),
        run=sized(run, FULL, QUICK),
        page=imagenet_page.page,
    )
}
