"""Trained networks with the data to judge posteriors by: training, held-out, test, and strangers.

Each function returns a task; those without their data or packages raise `Missing`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from nullbayes.experiments import adapters, text
from nullbayes.experiments.datasets import digits, read_color, read_images, read_uci, there
from nullbayes.experiments.frame import Missing, Settings
from nullbayes.experiments.networks import (
    ResNet,
    batchnorm_cnn,
    lenet,
    mlp,
    resnet20,
    train,
    train_cropped,
    train_shifted,
)

BATCH = 250
Inputs = Tensor | Mapping[str, Tensor]
Data = tuple[Inputs, Tensor]


@dataclass(frozen=True)
class Task:
    """A trained network, and the data to judge its posteriors by: all on the device.

    Attributes
    ----------
    name : str
        Of network and data.
    model : nn.Module
        Trained.
    train, test, held_out : (inputs, targets)
        None of them overlaps another; ``held_out`` is None for regressions.
    strangers : mapping of inputs
        By the name that their columns have.
    likelihood : str
        "classification" or "regression".
    parameters : mapping
        Which may vary, for the rows "output" and "loss"; all where nothing is said.
    member : callable or None
        Trains the same network from another seed; None for one that was not trained here.
    """

    name: str
    model: nn.Module
    train: Data
    test: Data
    held_out: Data | None = None
    strangers: Mapping[str, Inputs] = field(default_factory=dict)
    likelihood: str = "classification"
    parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    member: Callable[[int], nn.Module] | None = None


# --- data -------------------------------------------------------------------------------------------------------------


def take(inputs: Inputs, index: Any) -> Inputs:
    """Return some of the inputs."""
    if isinstance(inputs, Tensor):
        return inputs[index]
    return {name: part[index] for name, part in inputs.items()}


def batches(data: Data) -> list[Data]:
    """Return data in batches."""
    x, y = data
    slices = (slice(start, start + BATCH) for start in range(0, len(y), BATCH))
    return [(take(x, part), y[part]) for part in slices]


def thinned(data: Data, most: int) -> Data:
    """Return at most so many examples, at equal distances: some data are sorted by class."""
    x, y = data
    index = torch.arange(min(most, len(y)), device=y.device) * len(y) // min(most, len(y))
    return take(x, index), y[index]


@torch.no_grad()
def logits_of(model: nn.Module, x: Inputs) -> Tensor:
    """Return the network's logits, in double precision."""
    n = len(x if isinstance(x, Tensor) else next(iter(x.values())))
    parts = (take(x, slice(start, start + BATCH)) for start in range(0, n, BATCH))
    return torch.cat([model(part) if isinstance(part, Tensor) else model(**part) for part in parts]).double()


def _parts(settings: Settings, data: tuple[Tensor, Tensor], *sizes: int) -> list[Data]:
    """Return disjoint parts of data in random order: the first half of MNIST's test images, for one, is easier."""
    order, start, parts = torch.randperm(len(data[1]), generator=settings.generator()), 0, list[Data]()
    for size in sizes:
        index = order[start : start + size]
        parts.append((data[0][index].to(settings.device), data[1][index].to(settings.device)))
        start += size
    return parts


def _halves(x: Tensor, y: Tensor, held_out: int, test: int) -> dict[str, Any]:
    """Return one half of the data as held-out and the other as test, or as many as were asked for."""
    half = len(y) // 2
    kept, judged = slice(min(half, held_out)), slice(half, half + test)
    return {"held_out": (x[kept], y[kept]), "test": (x[judged], y[judged])}


def _network(
    settings: Settings, key: str, build: Callable[[], nn.Module], fit: Callable[[nn.Module], object]
) -> dict[str, Any]:
    """Return a trained network, and how to train others."""
    return {
        "model": settings.trained(f"{key}/seed {settings.seed}", build, fit),
        "member": lambda seed: settings.with_seed(seed).trained(f"{key}/member {seed}", build, fit),
    }


# --- small images -----------------------------------------------------------------------------------------------------


def demo_digits(settings: Settings, n: int, steps: int, *, held_out: int, test: int) -> Task:
    """Return the network of the demonstration, which never saw an 8 or a 9."""
    demo = importlib.import_module("nullbayes.demo")
    digits()  # says what is missing
    data = demo.load_digits()
    data = replace(data, x_train=data.x_train[:n], y_train=data.y_train[:n])
    x, y, x_test, y_test, unseen = (getattr(data, each.name).to(settings.device) for each in fields(data))

    fit = partial(demo.train, loss=cross_entropy, x=x, y=y, steps=steps)
    return Task(
        "CNN, digits 0 to 7", train=(x, y), **_network(settings, "digits", demo.network, fit),
        **_halves(x_test, y_test, held_out, test), strangers={"digits 8 and 9": unseen[:test]},
    )  # fmt: skip


def batchnorm_digits(settings: Settings, n: int, epochs: int, *, held_out: int, test: int) -> Task:
    """Return a network with batch normalization, which never saw an 8 or a 9."""
    x, y = digits()
    order = torch.randperm(len(x), generator=settings.generator())
    x, y = x[order].to(settings.device), y[order].to(settings.device)
    unseen, x, y = x[y >= 8], x[y < 8], y[y < 8]
    n = min(700, n)
    fit = partial(train, x=x[:n], y=y[:n], epochs=epochs)
    return Task(
        "BatchNorm CNN, digits", train=(x[:n], y[:n]), **_network(settings, "batchnorm", batchnorm_cnn, fit),
        **_halves(x[700:], y[700:], held_out, test), strangers={"digits 8 and 9": unseen[:test]},
    )  # fmt: skip


def lenet_images(settings: Settings, own: str, n: int, epochs: int = 0, *, held_out: int, test: int) -> Task:
    """Return LeNet on the folder ``own``, with the others of MNIST's family as strangers.

    Held out are training images beyond the first ``n``, or test images that are then not judged.
    """
    x, y = read_images(settings.data, own, "train")
    rest = _parts(settings, (x[n:], y[n:]), held_out)[0]
    parts = _parts(settings, read_images(settings.data, own, "t10k"), held_out, test)
    kept, judged = (parts[0], parts[1]) if not len(rest[1]) else (rest, parts[1])
    others = ("mnist" if own != "mnist" else "fashion-mnist", "kmnist")
    strangers = {
        name: read_images(settings.data, name, "t10k")[0][:test].to(settings.device)
        for name in there(settings.data, *others)
    }
    x, y = x[:n].to(settings.device), y[:n].to(settings.device)
    usual, batch_size = (60, 128) if n <= 10_000 else (20, 256)
    fit = partial(train, x=x, y=y, epochs=epochs or usual, batch_size=batch_size)
    return Task(
        f"LeNet, {own}", train=(x, y), test=judged, held_out=kept, strangers=strangers,
        **_network(settings, own, lenet, fit),
    )  # fmt: skip


# --- color images -----------------------------------------------------------------------------------------------------


def published_resnet(settings: Settings, n: int, free: Sequence[str], *, held_out: int, test: int) -> Task:
    """Return the published ResNet-20 on CIFAR-10, of which ``n`` training images are rows."""
    model, published = resnet20(settings.data)
    known, new = (read_color(settings.data, "cifar10", split) for split in ("train", "test"))
    if not published or known is None or new is None:
        msg = (
            "This needs weights/resnet20-12fca82f.th and cifar10*/*.npz with x_train, y_train, x_test and y_test in "
            "the data folder: --data FOLDER, or NULLBAYES_DATA."
        )
        raise Missing(msg)
    kept, judged = _parts(settings, new, held_out, test)
    return Task(
        "ResNet-20, CIFAR-10", model.to(settings.device), _parts(settings, known, n)[0], test=judged, held_out=kept,
        strangers=_color_strangers(settings, test, "cifar100", "svhn"), parameters={"output": free, "loss": free},
    )  # fmt: skip


def trained_resnet(
    settings: Settings, own: str, n: int, epochs: int, free: Sequence[str], *, held_out: int, test: int
) -> Task:
    """Return a residual network trained on all of "svhn" or "cifar10", of which ``n`` images are rows."""
    known, new = (read_color(settings.data, own, split) for split in ("train", "test"))
    if known is None or new is None:
        msg = f"This needs {own}*/*.npz with x_train, y_train, x_test and y_test: --data FOLDER, or NULLBAYES_DATA."
        raise Missing(msg)
    x, y = known[0].to(settings.device), known[1].to(settings.device)
    kept, judged = _parts(settings, new, held_out, test)
    fit = partial(
        train_cropped if own == "cifar10" else train_shifted, x=x, y=y, epochs=epochs
    )  # digits have no mirror
    others = [name for name in ("svhn", "cifar10", "cifar100") if name != own]
    return Task(
        f"ResNet, {own}", train=_parts(settings, (x.cpu(), y.cpu()), n)[0], test=judged, held_out=kept,
        strangers=_color_strangers(settings, test, *others), parameters={"output": free, "loss": free},
        **_network(settings, own, ResNet, fit),
    )  # fmt: skip


def _color_strangers(settings: Settings, most: int, *names: str) -> dict[str, Inputs]:
    """Return test images of other data sets, where they are there."""
    found = {name: read_color(settings.data, name, "test") for name in names}
    return {name: pair[0][:most].to(settings.device) for name, pair in found.items() if pair}


# --- others -----------------------------------------------------------------------------------------------------------


def uci_regression(settings: Settings, name: str, split: int, epochs: int) -> Task:
    """Return a network of one hidden layer on one of the usual splits of "concrete", "energy" or "yacht"."""
    x, y, x_test, y_test = (part.to(settings.device) for part in read_uci(settings.data, name, split))
    fit = partial(train, x=x, y=y, epochs=epochs, batch_size=32, loss=mse_loss)
    return Task(
        f"MLP, {name} {split}", train=(x, y), test=(x_test, y_test), likelihood="regression",
        **_network(settings, f"{name} {split}", partial(mlp, x.shape[1]), fit),
    )  # fmt: skip


def clinc_sentences(
    settings: Settings,
    n: int,
    epochs: int,
    free: Sequence[str],
    *,
    length: int,
    folder: str = "",
    rank: int = 0,
    held_out: int,
    test: int,
) -> Task:
    """Return MiniLM fine-tuned to tell 150 intents apart; ``free`` are the parameters of the loss rows.

    The projected posterior has the head alone, because 150 outputs are 150 rows per example. ``folder`` has the
    weights. With a ``rank``, adapters of that rank are trained with the head, and the encoder stays as it was.
    """
    splits, weights = text.read_clinc(settings.data), text.weights_folder(folder, settings.data)

    def some(split: str, most: int) -> Data:
        texts, y = splits[split]
        index = thinned((torch.arange(len(y)), y), most)[0]
        x = text.encode(weights, [texts[int(i)] for i in index], length)
        return {name: part.to(settings.device) for name, part in x.items()}, y[index].to(settings.device)  # type: ignore[index]

    known = some("train", n)
    more = f", adapters of rank {rank}" if rank else ""
    tune: Callable[..., nn.Module] = adapters.tune_adapters if rank else text.fine_tune
    fit = partial(tune, x=known[0], y=known[1], epochs=epochs)

    def build() -> nn.Module:
        model = text.minilm(weights, 150)
        return adapters.with_adapters(model, rank) if rank else model

    return Task(
        "MiniLM, CLINC150" + more, train=known, test=some("test", test), held_out=some("val", held_out),
        strangers={"out of scope": some("oos_test", test)[0]}, parameters={"output": ["head.*"], "loss": free},
        **_network(settings, "minilm" + more, build, fit),
    )  # fmt: skip
