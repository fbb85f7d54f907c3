"""Readers of data sets, in the formats in which they are distributed.

The folder of ``--data`` or ``NULLBAYES_DATA`` may hold ``mnist``, ``fashion-mnist`` and ``kmnist`` with the original
idx files, gzipped; CIFAR-10 as ``cifar10-*/*.npz`` with ``x_train`` (bytes, NHWC) and ``y_train``, and likewise
``x_test`` and ``y_test``; CIFAR-100 and SVHN likewise; ``weights/resnet20-12fca82f.th``; and regressions as
``uci/NAME`` with ``data.txt`` and files of indices. Without it, scikit-learn's digits stand in where they can.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nullbayes.experiments.frame import Missing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WHERE = "say where the data are: --data FOLDER, or NULLBAYES_DATA"


def there(folder: Path | None, *names: str) -> list[str]:
    """Return those of some data sets that a folder holds."""
    return [name for name in names if folder is not None and (folder / name).is_dir()]


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of bytes."""
    if not path.is_file():
        msg = f"{path} is not there; {WHERE}."
        raise Missing(msg)
    raw = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).reshape(shape)


def read_images(folder: Path | None, name: str, split: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 28, 28) between 0 and 1, and labels, of ``split`` "train" or "t10k"."""
    if folder is None:
        msg = f"This needs {name}: {WHERE}."
        raise Missing(msg)
    images = read_idx(folder / name / f"{split}-images-idx3-ubyte.gz")
    return images[:, None].float() / 255, read_idx(folder / name / f"{split}-labels-idx1-ubyte.gz").long()


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
    mean, std = (torch.tensor(values, device="cpu")[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (x.permute(0, 3, 1, 2).float() / 255 - mean) / std, y


def read_uci(folder: Path | None, name: str, split: int) -> tuple[Tensor, ...]:
    """Return x and y (n, 1) for training and for testing, standardized with the mean and spread of the former."""
    here = folder / "uci" / name if folder is not None else None
    if here is None or not all((here / file).is_file() for file in ("data.txt", f"index_train_{split}.txt")):
        msg = f"This needs uci/{name}/data.txt, index_train_{split}.txt and the other indices: {WHERE}."
        raise Missing(msg)
    table, inputs, target = np.loadtxt(here / "data.txt"), uci_indices(here, "features"), uci_indices(here, "target")
    known = table[uci_indices(here, f"train_{split}")]
    mean, spread = known.mean(0), known.std(0)
    scaled = torch.tensor((table - mean) / np.where(spread > 0, spread, 1.0), dtype=torch.float32, device="cpu")
    sides = (scaled[uci_indices(here, f"{side}_{split}")] for side in ("train", "test"))
    return tuple(side[:, columns] for side in sides for columns in (inputs, target))


def uci_indices(folder: Path, part: str) -> Any:
    """Return the rows or columns of a table that are "features", "target", "train_0", "test_0", ..."""
    return np.loadtxt(folder / f"index_{part}.txt", ndmin=1).astype(int)


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: images (1797, 1, 8, 8) between 0 and 1, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        msg = f"Without scikit-learn there are no digits to fall back on: pip install scikit-learn, or {WHERE}."
        raise Missing(msg) from error
    bunch = load_digits()
    images, labels = torch.from_numpy(bunch.images), torch.from_numpy(bunch.target)
    return images.float()[:, None] / 16, labels
