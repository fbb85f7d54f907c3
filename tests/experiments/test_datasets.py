"""Data sets are read in the formats in which they are distributed, and published weights fit their networks."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from nullbayes.experiments import datasets, networks
from nullbayes.experiments.frame import Missing


def test_resnet20_takes_the_published_weights(tmp_path: Path) -> None:
    other = networks.ResNet()
    assert sum(p.numel() for p in other.parameters()) == 269_722
    names = {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer3.2.bn2.running_var", "linear.bias"}
    assert names <= other.state_dict().keys()
    (tmp_path / "weights").mkdir()
    stored = {"state_dict": {f"module.{name}": value + 1 for name, value in other.state_dict().items()}}
    torch.save(stored, tmp_path / "weights" / "resnet20-12fca82f.th")
    model, given = networks.resnet20(tmp_path)
    assert given
    assert torch.equal(model.linear.weight, other.linear.weight + 1)


def test_cifar_is_read_and_normalized(tmp_path: Path) -> None:
    (tmp_path / "cifar10-small").mkdir()
    images = np.zeros((2, 32, 32, 3), np.uint8)
    images[1, 5, 7, 2] = 255
    np.savez(tmp_path / "cifar10-small" / "data.npz", x_train=images, y_train=np.array([3, 4], np.uint8))
    x, y = datasets.read_color(tmp_path, "cifar10", "train")
    assert y.tolist() == [3, 4]
    assert float(x[1, 2, 5, 7]) == pytest.approx((1 - 0.406) / 0.225)
    assert float(x[1, 2, 7, 5]) == pytest.approx(-0.406 / 0.225)


def test_images_are_read_from_idx_files(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    pixels = np.arange(2 * 28 * 28, dtype=np.int64).reshape(2, 28, 28).astype(np.uint8)
    header = b"\x00\x00\x08"
    for kind, array in (("images-idx3", pixels), ("labels-idx1", np.array([7, 2], np.uint8))):
        sizes = b"".join(int(n).to_bytes(4, "big") for n in array.shape)
        raw = header + bytes([array.ndim]) + sizes + array.tobytes()
        (tmp_path / "mnist" / f"t10k-{kind}-ubyte.gz").write_bytes(gzip.compress(raw))
    x, y = datasets.read_images(tmp_path, "mnist", "t10k")
    assert y.tolist() == [7, 2]
    assert torch.equal((x * 255).round().to(torch.uint8)[:, 0], torch.from_numpy(pixels))
    with pytest.raises(Missing, match="--data FOLDER"):
        datasets.read_images(tmp_path, "mnist", "train")
