"""Data sets, networks, and both together.

The folder of ``--data`` or ``NULLBAYES_DATA`` may hold ``mnist``, ``fashion-mnist`` and ``kmnist`` with the original
idx files, gzipped; CIFAR-10 as ``cifar10-*/*.npz`` with ``x_train`` (bytes, NHWC) and ``y_train``, and likewise
``x_test`` and ``y_test``; CIFAR-100 and SVHN likewise; ``weights/resnet20-12fca82f.th``; and regressions as
``uci/NAME`` with ``data.txt`` and files of indices. Without it, scikit-learn's digits stand in where they can.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nullbayes as nb
from benchmarks.frame import Settings, Skipped
from benchmarks.measure import seeded

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Build = Callable[[], nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]
_WHERE = "say where the data are: --data FOLDER, or NULLBAYES_DATA"

# --- data -------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of bytes."""
    if not path.is_file():
        msg = f"{path} is not there; {_WHERE}."
        raise Skipped(msg)
    raw = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).reshape(shape)


def read_images(folder: Path | None, name: str, split: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 28, 28) between 0 and 1, and labels, of ``split`` "train" or "t10k"."""
    if folder is None:
        msg = f"This needs {name}: {_WHERE}."
        raise Skipped(msg)
    images = read_idx(folder / name / f"{split}-images-idx3-ubyte.gz")
    return images[:, None].float() / 255, read_idx(folder / name / f"{split}-labels-idx1-ubyte.gz").long()


def read_cifar(folder: Path | None, split: str = "train") -> tuple[Tensor, Tensor] | None:
    """Return images of CIFAR-10; see `read_color`."""
    return read_color(folder, "cifar10", split)


def read_color(folder: Path | None, name: str, split: str) -> tuple[Tensor, Tensor] | None:
    """Return images (n, 3, 32, 32) of "train" or "test", normalized as the published weights expect, and labels.

    They are in the first file ``NAME/*.npz`` or ``NAME-*/*.npz``; None without one.
    """
    found = () if folder is None else (*folder.glob(f"{name}/*.npz"), *folder.glob(f"{name}-*/*.npz"))
    files = sorted(found)
    if not files:
        return None
    with np.load(files[0]) as arrays:
        if f"x_{split}" not in arrays:
            return None
        x, y = torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"]).long()
    mean, std = (torch.tensor(values)[:, None, None] for values in (_IMAGENET_MEAN, _IMAGENET_STD))
    return (x.permute(0, 3, 1, 2).float() / 255 - mean) / std, y


def read_uci(folder: Path | None, name: str, split: int) -> tuple[Tensor, ...]:
    """Return x and y (n, 1) for training and for testing, standardized with the mean and spread of the former."""
    here = folder / "uci" / name if folder is not None else None
    if here is None or not all((here / file).is_file() for file in ("data.txt", f"index_train_{split}.txt")):
        msg = f"This needs uci/{name}/data.txt, index_train_{split}.txt and the other indices: {_WHERE}."
        raise Skipped(msg)

    def indices(name: str) -> Any:
        return np.loadtxt(here / f"index_{name}.txt", ndmin=1).astype(int)

    table, inputs, target = np.loadtxt(here / "data.txt"), indices("features"), indices("target")
    known = table[indices(f"train_{split}")]
    mean, spread = known.mean(0), known.std(0)
    table = torch.tensor((table - mean) / np.where(spread > 0, spread, 1.0), dtype=torch.float32)
    sides = (table[indices(f"{side}_{split}")] for side in ("train", "test"))
    return tuple(side[:, columns] for side in sides for columns in (inputs, target))


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: images (1797, 1, 8, 8) between 0 and 1, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        msg = f"Without scikit-learn there are no digits to fall back on: pip install scikit-learn, or {_WHERE}."
        raise Skipped(msg) from error
    bunch = load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)


# --- networks ---------------------------------------------------------------------------------------------------------


def lenet(pool: str = "max") -> nn.Module:
    """Return the paper's network for 28 by 28 images; which pooling it has the paper does not say."""
    layer = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}[pool]
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), layer(2), nn.Conv2d(6, 16, 5), nn.Tanh(), layer(2), nn.Flatten(),
        nn.Linear(256, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def cnn(width: int, channels: int = 1, outputs: int = 10) -> nn.Module:
    """Return a small convolutional network for 8 by 8 images; its parameters grow with the square of ``width``."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * width, 8 * width), nn.Tanh(), nn.Linear(8 * width, outputs),
    )  # fmt: skip


def batchnorm_cnn() -> nn.Module:
    """Return a small convolutional network for 8 by 8 images, with ReLUs and batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def color_cnn() -> nn.Module:
    """Return a small convolutional network for 32 by 32 images with three colors, with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip


def mlp(inputs: int, width: int, outputs: int = 10) -> nn.Module:
    """Return a network of one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


class _Residual(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, and zeros for the new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.stride > 1 or self.new:
            x = nn.functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2)
            )
        return (x + y).relu()


class ResNet(nn.Module):
    """The residual network for CIFAR of He et al. (2015), with shortcuts of option A; ``blocks=3`` is ResNet-20."""

    def __init__(self, blocks: int = 3, width: int = 16, outputs: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(blocks, width, width, 1)
        self.layer2 = self._stage(blocks, width, 2 * width, 2)
        self.layer3 = self._stage(blocks, 2 * width, 4 * width, 2)
        self.linear = nn.Linear(4 * width, outputs)

    @staticmethod
    def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        first = _Residual(inputs, outputs, stride)
        return nn.Sequential(first, *(_Residual(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.bn1(self.conv1(x)).relu()
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def resnet20(folder: Path | None) -> tuple[nn.Module, bool]:
    """Return ResNet-20, and whether it has the published weights."""
    model = ResNet()
    path = folder / "weights" / "resnet20-12fca82f.th" if folder is not None else None
    if path is None or not path.is_file():
        return model.eval(), False
    stored = torch.load(path, map_location="cpu", weights_only=True)
    weights = {name.removeprefix("module."): value for name, value in stored.get("state_dict", stored).items()}
    model.load_state_dict(weights)
    return model.eval(), True


class _Basic(nn.Module):
    """Two convolutions and a shortcut, by a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


class _ResNet18(nn.Module):
    """The residual network of 18 layers for ImageNet of He et al. (2015)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        widths = [(64, 64), (64, 128), (128, 256), (256, 512)]
        self.stages = nn.Sequential(
            *(nn.Sequential(_Basic(a, b, 1 if a == b else 2), _Basic(b, b, 1)) for a, b in widths)
        )
        self.fc = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


def resnet18(outputs: int = 10) -> nn.Module:
    """Return ResNet-18 with random weights."""
    return _ResNet18(outputs).eval()


class _Logits(nn.Module):
    """A network of ``transformers`` that answers with logits alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.inner(x).logits


def swin(image: int, embed: int, depths: tuple[int, ...], heads: tuple[int, ...], window: int) -> nn.Module:
    """Return a Swin transformer with random weights, for 1,000 classes; nothing is downloaded."""
    try:
        from transformers import SwinConfig, SwinForImageClassification
    except ImportError as error:
        msg = "The Swin transformer needs transformers: pip install transformers."
        raise Skipped(msg) from error
    config = SwinConfig(
        image_size=image, embed_dim=embed, depths=list(depths), num_heads=list(heads), window_size=window,
        num_labels=1000,
    )  # fmt: skip
    return _Logits(SwinForImageClassification(config)).eval()


def bert(hidden: int, *, words: int, tokens: int, outputs: int) -> nn.Module:
    """Return a BERT of two layers with random weights, for sentences of so many tokens; nothing is downloaded."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        msg = "BERT needs transformers: pip install transformers (and no torchvision made for another torch)."
        raise Skipped(msg) from error
    config = BertConfig(
        vocab_size=words, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * hidden,
        max_position_embeddings=tokens, num_labels=outputs,
    )  # fmt: skip
    return _Logits(BertForSequenceClassification(config)).eval()


def distilbert(*, words: int, outputs: int) -> nn.Module:
    """Return a tiny DistilBERT with random weights; nothing is downloaded."""
    try:
        from transformers import DistilBertConfig, DistilBertForSequenceClassification
    except ImportError as error:
        msg = "DistilBERT needs transformers: pip install transformers (and no torchvision made for another torch)."
        raise Skipped(msg) from error
    config = DistilBertConfig(
        vocab_size=words, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32, num_labels=outputs
    )
    return _Logits(DistilBertForSequenceClassification(config)).eval()


# --- both -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A trained network and the data that it was trained on, on the device."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        """The data as one batch, so that no side of a comparison waits for a loader."""
        return [(self.x, self.y)]

    @property
    def n_parameters(self) -> int:
        """How many parameters the network has."""
        return sum(p.numel() for p in self.model.parameters())

    def first(self, n: int) -> Problem:
        """Return the same with fewer data."""
        return Problem(self.name, self.model, self.x[:n], self.y[:n])


def train(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, *, batch_size: int = 128, loss: Loss = cross_entropy
) -> nn.Module:
    """Train with Adam at 1e-3, as the paper does, with the global generator."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).to(x.device).split(batch_size):
            optimizer.zero_grad()
            loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def trained_on_images(settings: Settings, n: int, epochs: int) -> Problem:
    """Return LeNet on Fashion-MNIST where there are data, else a small convolutional network on digits."""
    if settings.data is not None and (settings.data / "fashion-mnist").is_dir():
        x, y = read_images(settings.data, "fashion-mnist", "train")
        name, build = "LeNet on Fashion-MNIST", lenet
    else:
        x, y = digits()
        name, build = "CNN on digits", lambda: cnn(16)
    return _trained(settings, name, build, x[:n], y[:n], epochs)


def trained_on_digits(settings: Settings, name: str, build: Build, n: int, epochs: int) -> Problem:
    """Return a network for 8 by 8 images, trained on digits or, without them, on shrunken images of the data folder."""
    try:
        x, y = digits()
    except Skipped:
        x, y = read_images(settings.data, "fashion-mnist", "train")
        x = nn.functional.avg_pool2d(x[:, :, 2:26, 2:26], 3)
    return _trained(settings, name, build, x[:n], y[:n], epochs)


def _trained(settings: Settings, name: str, build: Build, x: Tensor, y: Tensor, epochs: int) -> Problem:
    x, y = x.to(settings.device), y.to(settings.device)
    with seeded(settings.seed):
        model = build().to(settings.device)
        if epochs:
            train(model, x, y, epochs)
    return Problem(name, model.eval(), x, y)


def untrained(settings: Settings, build: Build, shape: tuple[int, ...], n: int, classes: int = 10) -> Problem:
    """Return a network as it begins on random images: for figures that do not depend on what was learned."""
    y = torch.randint(classes, (n,), generator=settings.generator())
    return _trained(settings, "random", build, settings.normal(n, *shape), y, 0)


# Rows -> posterior and rows. Posteriors are timed with prior_precision=1.0: no time depends on it, and the few rows of
# a small run may have no optimum.
KINDS = {
    "output": (nb.ProjectedPosterior, nb.OutputJacobian),
    "loss": (nb.LossProjectedPosterior, nb.LossJacobian),
}
