"""Trained networks with the data to judge posteriors by: training, held-out, test, and strangers.

A part is a function that yields tasks; its options are those of the case. Those without their data or packages raise
:class:`Skipped <benchmarks.frame.Skipped>`.

- digits: the network of the demonstration; batchnorm: a CNN with batch normalization, on scikit-learn's digits;
- lenet: on the folders ``lenet_data``, with ``lenet_n`` images (several of either are joined by plus signs);
- resnet20: the published network on CIFAR-10, with ``resnet_parameters`` free (globs joined by plus signs; all: ``*``);
- svhn: a residual network trained on SVHN digits, ``svhn*/*.npz`` like those of CIFAR-10;
- uci: regressions, networks of one hidden layer, on the first ``splits`` of the usual splits;
- minilm: a sentence encoder fine-tuned on CLINC150, ``minilm_parameters`` free for the loss-projected posterior and the
  head for the projected one, to which 150 outputs are 150 rows an example. ``minilm`` is the folder with its weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks import text
from benchmarks.frame import Settings, Skipped
from benchmarks.measure import seeded
from benchmarks.problems import (
    Build,
    ResNet,
    batchnorm_cnn,
    digits,
    lenet,
    read_color,
    read_images,
    read_uci,
    resnet20,
    train,
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
    build : callable or None
        Makes the same network, untrained, where it was trained here with ``train``.
    epochs : int
        Of that training.
    """

    name: str
    model: nn.Module
    train: Data
    test: Data
    held_out: Data | None = None
    strangers: Mapping[str, Inputs] = field(default_factory=dict)
    likelihood: str = "classification"
    parameters: Mapping[str, list[str]] = field(default_factory=dict)
    build: Build | None = None
    epochs: int = 0


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


def _halves(settings: Settings, x: Tensor, y: Tensor) -> dict[str, Data]:
    """Return one half of the data as held-out and the other as test, or as many as the options say."""
    o, half = settings.options, len(y) // 2
    held_out, test = slice(min(half, o.held_out)), slice(half, half + o.test)
    return {"held_out": (x[held_out], y[held_out]), "test": (x[test], y[test])}


# --- networks ---------------------------------------------------------------------------------------------------------


def _digits(settings: Settings) -> Iterator[Task]:
    """Yield the network of the demonstration, which never saw an 8 or a 9."""
    o, device, demo = settings.options, settings.device, importlib.import_module("nullbayes.demo")
    digits()  # says what is missing
    data = demo.load_digits()
    data = replace(data, x_train=data.x_train[: o.digits_n], y_train=data.y_train[: o.digits_n])
    with seeded(settings.seed):
        model = demo.train_on_digits(data, o.digits_steps).to(device)
    x, y, x_test, y_test, unseen = (getattr(data, each.name).to(device) for each in fields(data))
    yield Task(
        "CNN, digits 0 to 7", model, (x, y), **_halves(settings, x_test, y_test),
        strangers={"digits 8 and 9": unseen[: o.test]},
    )  # fmt: skip


def _batchnorm(settings: Settings) -> Iterator[Task]:
    """Yield a network with batch normalization, which never saw an 8 or a 9."""
    o, (x, y) = settings.options, digits()
    order = torch.randperm(len(x), generator=settings.generator())
    x, y = x[order].to(settings.device), y[order].to(settings.device)
    unseen, x, y = x[y >= 8], x[y < 8], y[y < 8]
    n = min(700, o.digits_n)
    with seeded(settings.seed):
        model = train(batchnorm_cnn().to(settings.device), x[:n], y[:n], o.batchnorm_epochs)
    yield Task(
        "BatchNorm CNN, digits", model, (x[:n], y[:n]), **_halves(settings, x[700:], y[700:]),
        strangers={"digits 8 and 9": unseen[: o.test]}, build=batchnorm_cnn, epochs=o.batchnorm_epochs,
    )  # fmt: skip


def _lenet(settings: Settings) -> Iterator[Task]:
    """Yield LeNet on data sets that are each other's strangers."""
    o, device = settings.options, settings.device
    for own in o.lenet_data.split("+"):
        x, y = (part.to(device) for part in read_images(settings.data, own, "train"))
        x_test, y_test = (part.to(device) for part in _shuffled(read_images(settings.data, own, "t10k"), settings))
        others = ("mnist" if own != "mnist" else "fashion-mnist", "kmnist")
        there = [name for name in others if (settings.data / name).is_dir()]
        strangers = {name: read_images(settings.data, name, "t10k")[0][: o.test].to(device) for name in there}
        for n in map(int, o.lenet_n.split("+")):
            epochs, batch_size = (o.lenet_epochs, 128) if n <= 10_000 else (20, 256)
            with seeded(settings.seed):
                model = train(lenet().to(device), x[:n], y[:n], epochs, batch_size=batch_size)
            held_out, start = (x[n:][-o.held_out :], y[n:][-o.held_out :]), 0
            if not len(held_out[1]):
                held_out, start = (x_test[: o.held_out], y_test[: o.held_out]), o.held_out
            test = x_test[start:][: o.test], y_test[start:][: o.test]
            yield Task(f"LeNet, {own}", model, (x[:n], y[:n]), test, held_out, strangers, build=lenet, epochs=epochs)


def _resnet20(settings: Settings) -> Iterator[Task]:
    """Yield the published ResNet-20."""
    o, device = settings.options, settings.device
    model, published = resnet20(settings.data)
    known, new = (read_color(settings.data, "cifar10", split) for split in ("train", "test"))
    if not published or known is None or new is None:
        msg = (
            "This needs weights/resnet20-12fca82f.th and cifar10*/*.npz with x_train, y_train, x_test and y_test in "
            "the data folder: --data FOLDER, or NULLBAYES_DATA."
        )
        raise Skipped(msg)

    def some(data: Data, start: int, stop: int) -> Data:
        index = torch.randperm(len(data[1]), generator=settings.generator())[start:stop]
        return take(data[0], index).to(device), data[1][index].to(device)

    free = o.resnet_parameters.split("+")
    yield Task(
        "ResNet-20, CIFAR-10", model.to(device), some(known, 0, o.resnet_n),
        test=some(new, o.held_out, o.held_out + o.test), held_out=some(new, 0, o.held_out),
        strangers=_strangers(settings, "cifar100", "svhn"), parameters={"output": free, "loss": free},
    )  # fmt: skip


def _svhn(settings: Settings) -> Iterator[Task]:
    """Yield a residual network, trained on SVHN digits."""
    o, device = settings.options, settings.device
    known, new = (read_color(settings.data, "svhn", split) for split in ("train", "test"))
    if known is None or new is None:
        msg = "This needs svhn*/*.npz with x_train, y_train, x_test and y_test: --data FOLDER, or NULLBAYES_DATA."
        raise Skipped(msg)
    x, y, x_test, y_test = (part.to(device) for part in (*known, *_shuffled(new, settings)))
    with seeded(settings.seed):
        model = _train_shifted(ResNet().to(device), x, y, o.svhn_epochs)
    free, h = o.resnet_parameters.split("+"), o.held_out
    yield Task(
        "ResNet, SVHN", model, (x[: o.resnet_n], y[: o.resnet_n]), test=(x_test[h:][: o.test], y_test[h:][: o.test]),
        held_out=(x_test[:h], y_test[:h]), strangers=_strangers(settings, "cifar10", "cifar100"),
        parameters={"output": free, "loss": free},
    )  # fmt: skip


def _shuffled(data: tuple[Tensor, Tensor], settings: Settings) -> tuple[Tensor, Tensor]:
    """Return data in random order: the first half of MNIST's test images, for one, is easier than the second."""
    order = torch.randperm(len(data[1]), generator=settings.generator())
    return data[0][order], data[1][order]


def _strangers(settings: Settings, *names: str) -> dict[str, Inputs]:
    """Return test images of other data sets, where they are there."""
    found = {name: read_color(settings.data, name, "test") for name in names}
    return {name: pair[0][: settings.options.test].to(settings.device) for name, pair in found.items() if pair}


def _train_shifted(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train with AdamW at a rate that rises and falls, on images that are shifted by up to three pixels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.05)
    steps = epochs * -(-len(x) // 128)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=max(1, steps))
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).to(x.device).split(128):
            shift = torch.randint(-3, 4, (2,)).tolist()
            optimizer.zero_grad()
            cross_entropy(model(torch.roll(x[batch], shift, (2, 3))), y[batch]).backward()
            optimizer.step()
            rate.step()
    return model.eval()


def _uci(settings: Settings) -> Iterator[Task]:
    """Yield small regressions."""
    o = settings.options
    for name in ("concrete", "energy", "yacht"):
        for split in range(o.splits):
            x, y, x_test, y_test = (part.to(settings.device) for part in read_uci(settings.data, name, split))
            with seeded(settings.seed):
                model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)).to(settings.device)
                train(model, x, y, o.uci_epochs, batch_size=32, loss=mse_loss)
            yield Task(f"MLP, {name} {split}", model, (x, y), (x_test, y_test), likelihood="regression")


def _minilm(settings: Settings) -> Iterator[Task]:
    """Yield a sentence encoder, fine-tuned to tell 150 intents apart."""
    o, device = settings.options, settings.device
    splits, folder = text.read_clinc(settings.data), text.weights_folder(o.minilm, settings.data)

    def some(split: str, most: int) -> Data:
        texts, y = splits[split]
        index = thinned((torch.arange(len(y)), y), most)[0].tolist()
        x = text.encode(folder, [texts[i] for i in index], o.minilm_length)
        return {name: part.to(device) for name, part in x.items()}, y[index].to(device)

    with seeded(settings.seed):
        model = text.minilm(folder, 150).to(device)
        known = some("train", o.minilm_n)
        text.fine_tune(model, *known, o.minilm_epochs)
    yield Task(
        "MiniLM, CLINC150", model, known, test=some("test", o.test), held_out=some("val", o.held_out),
        strangers={"out of scope": some("oos_test", o.test)[0]},
        parameters={"output": ["head.*"], "loss": o.minilm_parameters.split("+")},
    )  # fmt: skip


PARTS = {
    "digits": _digits, "batchnorm": _batchnorm, "lenet": _lenet, "resnet20": _resnet20, "svhn": _svhn, "uci": _uci,
    "minilm": _minilm,
}  # fmt: skip
