"""Networks of the experiments, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Build = Callable[[], nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]

# --- networks ---------------------------------------------------------------------------------------------------------


def lenet(pool: str = "max") -> nn.Module:
    """Return the paper's network for 28 by 28 images; which pooling it has the paper does not say."""
    layer = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}[pool]
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), layer(2), nn.Conv2d(6, 16, 5), nn.Tanh(), layer(2), nn.Flatten(),
        nn.Linear(256, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def cnn(width: int, outputs: int = 10) -> nn.Module:
    """Return a small convolutional network for 8 by 8 images; its parameters grow with the square of ``width``."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * width, 8 * width), nn.Tanh(), nn.Linear(8 * width, outputs),
    )  # fmt: skip


def mlp(inputs: int) -> nn.Module:
    """Return a network of one hidden layer with 50 units for a regression."""
    return nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, 1))


def batchnorm_cnn() -> nn.Module:
    """Return a small convolutional network for 8 by 8 images, with ReLUs and batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


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
        return nn.functional.relu(x + y)


class ResNet(nn.Module):
    """The residual network for CIFAR of He et al. (2015), with shortcuts of option A; ``blocks=3`` is ResNet-20."""

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(blocks, width, width, 1)
        self.layer2 = self._stage(blocks, width, 2 * width, 2)
        self.layer3 = self._stage(blocks, 2 * width, 4 * width, 2)
        self.linear = nn.Linear(4 * width, 10)

    @staticmethod
    def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        first = _Residual(inputs, outputs, stride)
        return nn.Sequential(first, *(_Residual(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.bn1(self.conv1(x)).relu()
        logits: Tensor = self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))
        return logits


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


# --- training ---------------------------------------------------------------------------------------------------------


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


def train_shifted(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train with AdamW at a rate that rises and falls, on images that are shifted by up to three pixels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.05)
    return _train_changed(model, x, y, epochs, 128, optimizer, _shifted)


def train_cropped(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train with SGD at a rate that rises and falls, on images that are cropped and mirrored."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return _train_changed(model, x, y, epochs, 256, optimizer, _cropped)


def _train_changed(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    change: Callable[[Tensor], Tensor],
) -> nn.Module:
    steps = epochs * -(-len(x) // batch_size)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.defaults["lr"], total_steps=max(1, steps))
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).to(x.device).split(batch_size):
            optimizer.zero_grad()
            cross_entropy(model(change(x[batch])), y[batch]).backward()
            optimizer.step()
            rate.step()
    return model.eval()


def _shifted(x: Tensor) -> Tensor:
    """Shift all images alike by up to three pixels; what leaves on one side enters on the other."""
    return torch.roll(x, torch.randint(-3, 4, (2,)).tolist(), (2, 3))


def _cropped(x: Tensor) -> Tensor:
    """Shift each image by up to four pixels, with zeros beside it, and mirror half of them."""
    n, height, width = len(x), *x.shape[-2:]
    wide = nn.functional.pad(torch.where(torch.rand(n, 1, 1, 1).to(x.device) < 0.5, x.flip(3), x), (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, n, 1)).to(x.device)
    rows, columns = (start + torch.arange(size, device=x.device) for start, size in ((top, height), (left, width)))
    image = torch.arange(n, device=x.device)[:, None, None]
    return wide[image, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
