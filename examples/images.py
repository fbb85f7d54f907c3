"""A network with BatchNorm, and the loader that it was trained with: shuffled, augmented, its last batch dropped.

Run: python examples/images.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import nullbayes as nb


class Digits(Dataset[tuple[Tensor, int]]):
    """Digits of 8 by 8 pixels; ``augment`` moves each by a random pixel, as one does in training."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, augment: bool) -> None:
        self.images = torch.tensor(images, dtype=torch.float32)[:, None] / 16
        self.labels, self.augment = labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = self.images[i]
        if self.augment:
            image = image.roll(int(torch.randint(-1, 2, ())), dims=-1)
        return image, int(self.labels[i])


def network() -> nn.Module:
    """Return a small convolutional network with BatchNorm, for eight classes."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 8),
    )  # fmt: skip


def main(n: int = 800, epochs: int = 15) -> dict[str, Any]:
    """Train, see why the training loader is refused, make the right one, fit, calibrate, and meet unknown digits."""
    torch.manual_seed(0)
    data = load_digits()
    known = data.target < 8  # 8 and 9 are strangers
    order = np.random.default_rng(0).permutation(known.sum())  # the digits are sorted by who wrote them: mix them first
    images, labels = data.images[known][order], data.target[known][order]
    loader = DataLoader(Digits(images[:n], labels[:n], augment=True), batch_size=64, shuffle=True, drop_last=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    try:
        nb.ProjectedPosterior(model).fit(loader)
    except nb.errors.DataError as error:
        refused = str(error)
        print(refused, "\n")

    # augmentation is switched off in the dataset; the rest is what evaluation_loader does
    plain = DataLoader(Digits(images[:n], labels[:n], augment=False), batch_size=64, shuffle=True, drop_last=True)
    posterior = nb.ProjectedPosterior(model).fit(nb.evaluation_loader(plain), progress=False)
    print(posterior.report, "\n")
    held_out = Digits(images[n : n + 400], labels[n : n + 400], augment=False)
    posterior.calibrate(DataLoader(held_out, batch_size=64))  # any order will do
    print(posterior.calibration, "\n")
    test = Digits(images[n + 400 :], labels[n + 400 :], augment=False)
    check = posterior.check_fit(DataLoader(test, batch_size=64))
    strange = torch.tensor(data.images[~known], dtype=torch.float32)[:, None] / 16
    auroc = nb.metrics.auroc(posterior.ood_score(test.images), posterior.ood_score(strange))
    alarms, flagged = (float(posterior.is_ood(x).double().mean()) for x in (test.images, strange))
    print(check)
    print(f"flagged at a false-alarm rate of 5 %: {alarms:.1%} of familiar digits, {flagged:.1%} of unknown ones")
    print(f"AUROC of digits that it never saw: {auroc:.3f}")
    return {"refused": refused, "check": check, "auroc": auroc, "n_data": posterior.report.n_data,
            "false alarms": alarms, "flagged": flagged}  # fmt: skip


if __name__ == "__main__":
    main()
