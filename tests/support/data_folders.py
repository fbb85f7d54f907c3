"""Small made-up data sets in the formats in which the real ones are distributed."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a gzipped idx file of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes(), 1))


def write_images(folder: Path, name: str, n: int, seed: int = 0) -> None:
    """Write ``n`` training and ``n`` test images of ten classes, 28 by 28: a pattern for each class, and noise."""
    random = np.random.default_rng(seed)
    patterns = 255 * (random.random((10, 7, 7)) > 0.6)
    for split in ("train", "t10k"):
        labels = np.arange(n) % 10
        images = patterns[labels].repeat(4, 1).repeat(4, 2) * random.uniform(0.4, 1.0, (n, 28, 28))
        write_idx(folder / name / f"{split}-images-idx3-ubyte.gz", images)
        write_idx(folder / name / f"{split}-labels-idx1-ubyte.gz", labels)


def write_regression(folder: Path, name: str, n: int, splits: int) -> None:
    """Write a table of two inputs and a target of unit 100, with splits of nine tenths and one tenth."""
    random, here = np.random.default_rng(0), folder / "uci" / name
    here.mkdir(parents=True)
    x = random.normal(size=(n, 2))
    y = 100.0 * (np.sin(x[:, 0]) + 0.5 * x[:, 1] + 0.1 * random.normal(size=n))
    np.savetxt(here / "data.txt", np.column_stack([x, y]))
    np.savetxt(here / "index_features.txt", [0, 1], fmt="%d")
    np.savetxt(here / "index_target.txt", [2], fmt="%d")
    for split in range(splits):
        order = random.permutation(n)
        np.savetxt(here / f"index_train_{split}.txt", order[n // 5 :], fmt="%d")
        np.savetxt(here / f"index_test_{split}.txt", order[: n // 5], fmt="%d")


def write_blobs(folder: Path) -> Path:
    """Write images of ten kinds of blobs in the form of MNIST, and other blobs as strangers."""
    generator = torch.Generator().manual_seed(0)
    for name, shade in (("mnist", 1.0), ("fashion-mnist", 0.5), ("kmnist", 0.7)):
        for split, n in (("train", 100), ("t10k", 100)):
            y = torch.arange(n) % 10
            place = torch.stack([4 + 2 * y, 22 - 2 * y], 1) if name == "mnist" else torch.full((n, 2), 14)
            grid = torch.arange(28.0)
            near = [torch.exp(-((grid - place[:, i, None]) ** 2) / 18) for i in range(2)]
            blobs = shade * near[0][:, :, None] * near[1][:, None, :]
            noisy = (255 * (blobs + 0.2 * torch.rand(n, 28, 28, generator=generator))).clamp(0, 255)
            write_idx(folder / name / f"{split}-images-idx3-ubyte.gz", noisy.numpy())
            wrong = torch.rand(n, generator=generator) < 0.2  # nothing predicts these labels
            labels = torch.where(wrong, torch.randint(10, (n,), generator=generator), y)
            write_idx(folder / name / f"{split}-labels-idx1-ubyte.gz", labels.numpy())
    return folder
