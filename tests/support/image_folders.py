"""Small data sets of images in the formats in which CelebA, Food-101, ImageNet and Places365 are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from nullbayes.experiments import find
from nullbayes.experiments.running import reproduce

ATTRIBUTES = ("Bald", "Smiling", "Eyeglasses", "Male", "Mustache", "Young")


def save_image(path: Path, seed: int, size: tuple[int, int], tint: float = 0.0) -> None:
    """Write a JPEG of smooth noise, lighter by ``tint``."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).random((5, 5, 3)) * (1 - tint) + tint
    image = Image.fromarray((255 * noise).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    image.save(path, "JPEG", quality=90)


def make_celeba(
    data: Path,
    faces: Sequence[tuple[int, Sequence[str]]],
    attributes: Sequence[str] = ATTRIBUTES,
    size: tuple[int, int] = (22, 27),
) -> None:
    """Write CelebA: for each face its split and its attributes; images are numbered from 1."""
    folder = data / "celeba"
    lines, parts = [], []
    for i, (split, has) in enumerate(faces):
        name = f"{i + 1:06d}.jpg"
        save_image(folder / "img_align_celeba" / name, i, size, 0.5 * ("Smiling" in has))
        lines.append(f"{name} " + " ".join(f"{1 if each in has else -1:2d}" for each in attributes))
        parts.append(f"{name} {split}")
    head = [str(len(faces)), " ".join(attributes) + " "]
    (folder / "list_attr_celeba.txt").write_text("\n".join([*head, *lines]) + "\n")
    (folder / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")


def make_food(data: Path, names: Sequence[str]) -> None:
    """Write Food-101 with test images of these names, such as "apple_pie/1011328"."""
    folder = data / "food-101"
    for i, name in enumerate(names):
        save_image(folder / "images" / f"{name}.jpg", 1000 + i, (40, 30), 0.8)
    (folder / "meta").mkdir()
    (folder / "meta" / "test.txt").write_text("\n".join(names) + "\n")


def make_imagenet(data: Path, classes: Sequence[str], per_class: int, size: int, split: str = "train") -> None:
    """Write folders of classes."""
    for c, name in enumerate(classes):
        for i in range(per_class):
            seed = 100 * c + i + 50 * (split == "val")
            save_image(data / "imagenet" / split / name / f"{name}_{i}.JPEG", seed, (size + 9, size + 2), 0.2 * c)


def make_validation(data: Path, synsets: Sequence[tuple[int, str]], truth: Sequence[int], size: int) -> None:
    """Write validation images of ImageNet in one folder, and the devkit: numbers and names, and a number per image."""
    from scipy import io

    home = data / "imagenet"
    for i in range(len(truth)):
        save_image(home / "val" / f"ILSVRC2012_val_{i + 1:08d}.JPEG", 9000 + i, (size + 9, size + 2))
    devkit = home / "ILSVRC2012_devkit_t12" / "data"
    devkit.mkdir(parents=True)
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{number}\n" for number in truth))
    table = np.array(synsets, dtype=[("ILSVRC2012_ID", "f8"), ("WNID", "O")])
    io.savemat(devkit / "meta.mat", {"synsets": table[:, None]})


def make_places(data: Path, n: int, size: int) -> None:
    """Write validation images of Places365."""
    names = [f"Places365_val_{i + 1:08d}.jpg" for i in range(n)]
    for i, name in enumerate(names):
        save_image(data / "places365" / "val_256" / name, 5000 + i, (size, size), 0.6)
    lines = [f"{name} {7 * i % 365}" for i, name in enumerate(names)]
    (data / "places365" / "places365_val.txt").write_text("\n".join(lines) + "\n")


def whole_run(experiment: ModuleType, sizes: Any, data: Path, where: Path) -> Path:
    """The folder of a whole run of "celeba" or "imagenet", as the command makes it."""
    name = experiment.__name__.rpartition(".")[2]
    own = {"run": partial(experiment.run, sizes=sizes), "estimate": partial(experiment.estimate, sizes=sizes)}
    cpu = torch.device("cpu")
    return reproduce(replace(find(name), **own), where, data=data, device=cpu, seeds=1, say=lambda line: None)
