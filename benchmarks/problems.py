"""Networks of the benchmarks, beside those of the experiments, and both with their data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import nullbayes as nb
from benchmarks.frame import Settings, Skipped
from nullbayes.experiments.datasets import digits, read_images, there
from nullbayes.experiments.measuring import seeded
from nullbayes.experiments.networks import Build, cnn, lenet, train

# --- networks ---------------------------------------------------------------------------------------------------------


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


def trained_on_images(settings: Settings, n: int, epochs: int) -> Problem:
    """Return LeNet on Fashion-MNIST where there are data, else a small convolutional network on digits."""
    if there(settings.data, "fashion-mnist"):
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
