"""Images in folders, as CelebA, Food-101, ImageNet and Places365 are distributed.

========== ======================================================= ==============================================
data set   images                                                  what is said of them
========== ======================================================= ==============================================
CelebA     ``celeba/img_align_celeba/*.jpg``                       ``list_attr_celeba.txt``,
                                                                   ``list_eval_partition.txt``
Food-101   ``food-101/images/CLASS/*.jpg``                         ``food-101/meta/test.txt``
ImageNet   ``imagenet/train/n01440764/*.JPEG``, ``val`` likewise,  the names of the folders, or the devkit,
           or ``val/*.JPEG``                                       ``imagenet/ILSVRC2012_devkit_t12/data``
Places365  ``places365/val_256/*.jpg``                             ``places365/places365_val.txt``
========== ======================================================= ==============================================

Images are decoded, resized and cropped by Pillow when they are asked for, always in the same way.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nullbayes.experiments.datasets import IMAGENET_MEAN, IMAGENET_STD, WHERE
from nullbayes.experiments.frame import Missing

_IMAGES = (".jpg", ".jpeg")
_MEAN, _STD = np.array(IMAGENET_MEAN, np.float32), np.array(IMAGENET_STD, np.float32)


# --- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """How an image becomes a tensor.

    Attributes
    ----------
    size : int
        Pixels along a side of the central square that is cut out.
    shorter : int
        Pixels along the shorter side of the image before.
    """

    size: int
    shorter: int

    def of(self, path: Path) -> Tensor:
        """Return an image (3, size, size), normalized with the mean and the spread of ImageNet."""
        image_module = _pillow()
        try:
            with image_module.open(path) as file:
                image = file.convert("RGB")
        except FileNotFoundError as error:
            msg = f"{path} is not there; {WHERE}."
            raise Missing(msg) from error
        except (OSError, SyntaxError, ValueError) as error:
            msg = f"{path} cannot be read as an image ({error}): fetch it again, or remove it from its list."
            raise Missing(msg) from error
        scale = self.shorter / min(image.size)
        width, height = (max(self.size, round(scale * side)) for side in image.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        image = image.resize((width, height), image_module.Resampling.BICUBIC)
        pixels = np.asarray(image.crop((left, top, left + self.size, top + self.size)), np.float32) / 255
        return torch.from_numpy((pixels - _MEAN) / _STD).movedim(-1, 0).contiguous()


@dataclass(frozen=True)
class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images and their targets, in a fixed order; batches are decoded by several threads.

    Attributes
    ----------
    files : tuple of Path
        One per image.
    targets : Tensor (n,) or (n, O)
        One per image.
    view : View
        How they become tensors.
    """

    files: tuple[Path, ...]
    targets: Tensor
    view: View

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.view.of(self.files[index]), self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several images at once, as a ``DataLoader`` asks for them."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            return list(threads.map(self.__getitem__, indices))

    def where(self, chosen: Tensor) -> Images:
        """Return some of the images, by a mask or by their numbers."""
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        return replace(self, files=tuple(self.files[i] for i in index.tolist()), targets=self.targets[index])

    def some(self, most: int | None, seed: int = 0) -> Images:
        """Return at most so many images, drawn without their order, which may be that of classes."""
        if most is None or most >= len(self):
            return self
        drawn = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:most]
        return self.where(drawn.sort().values)


def _pillow() -> Any:
    """Return the module of Pillow that opens images."""
    try:
        from PIL import Image
    except ImportError as error:
        msg = "Images are read with Pillow, which is not there: pip install 'nullbayes[images]'."
        raise Missing(msg) from error
    return Image


# --- folders and lists ------------------------------------------------------------------------------------------------


def _folder(data: Path | None, name: str) -> Path:
    if data is None or not (data / name).is_dir():
        msg = f"This needs the folder {name}: {WHERE}."
        raise Missing(msg)
    return data / name


def _first(folder: Path, name: str, *below: str) -> Path:
    """Return a file or a folder, which may be in one of several folders."""
    places = [folder / name, *(folder / part / name for part in below)]
    for place in places:
        if place.exists():
            return place
    msg = f"{places[0]} is not there; {WHERE}."
    raise Missing(msg)


def _words(path: Path) -> list[list[str]]:
    """Return the words of all lines that have any."""
    return [words for line in path.read_text(encoding="utf-8").splitlines() if (words := line.split())]


def _there(folder: Path, names: Sequence[str], said: Path) -> tuple[Path, ...]:
    """Return the files of a list, all of which must be there; folders are read once."""
    found: dict[str, set[str]] = {}
    for name in names:
        parent = os.path.dirname(name)
        if parent not in found:
            found[parent] = set(os.listdir(folder / parent)) if (folder / parent).is_dir() else set()
        if os.path.basename(name) not in found[parent]:
            msg = f"{folder / name}, which {said.name} names, is not there: unpack the images again."
            raise Missing(msg)
    return tuple(folder / name for name in names)


# --- data sets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CelebA:
    """Faces, with 40 attributes each.

    Attributes
    ----------
    images : Images
        All of them; the targets (n, O) are 1.0 where an image has an attribute.
    attributes : tuple of str
        Their names.
    split : Tensor (n,)
        0 for training, 1 for validation, 2 for test.
    """

    images: Images
    attributes: tuple[str, ...]
    split: Tensor

    def has(self, name: str) -> Tensor:  # (n,)
        """Return which images have an attribute."""
        return self.images.targets[:, self.attributes.index(name)] > 0


def read_celeba(data: Path | None, view: View) -> CelebA:
    """Read the lists of CelebA, which may be in ``Anno`` and ``Eval``; images are read when they are asked for."""
    folder = _folder(data, "celeba")
    listed, parts = (
        _first(folder, "list_attr_celeba.txt", "Anno"),
        _first(folder, "list_eval_partition.txt", "Eval"),
    )
    _, attributes, *lines = _words(listed)
    split = {words[0]: int(words[1]) for words in _words(parts)}
    odd = next((words[0] for words in lines if len(words) != len(attributes) + 1 or words[0] not in split), None)
    if odd is not None:
        msg = f"{odd} is not in {parts}, or has not {len(attributes)} attributes in {listed}: fetch both lists again."
        raise Missing(msg)
    names = [words[0] for words in lines]
    targets = torch.tensor([[float(word == "1") for word in words[1:]] for words in lines])
    files = _there(_first(folder, "img_align_celeba", "Img"), names, listed)
    return CelebA(Images(files, targets, view), tuple(attributes), torch.tensor([split[name] for name in names]))


def read_food(data: Path | None, view: View) -> Images:
    """Return the test images of Food-101, with the numbers of their classes in alphabetical order."""
    folder = _folder(data, "food-101")
    listed = _first(folder, "test.txt", "meta")
    names = [words[0] for words in _words(listed)]
    classes = sorted({os.path.dirname(name) for name in names})
    files = _there(_first(folder, "images"), [f"{name}.jpg" for name in names], listed)
    return Images(files, torch.tensor([classes.index(os.path.dirname(name)) for name in names]), view)


def read_imagenet(data: Path | None, split: str, view: View) -> Images:
    """Return images of ImageNet, with the numbers of their classes in the order of the names n01440764, ...

    "train" and "val" are folders of classes, and "val" may be a folder of images with the devkit beside it.
    """
    home = _folder(data, "imagenet")
    folder = _first(home, split)
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not classes and split == "val":
        return _from_devkit(home, folder, view)
    listed = [(f"{name}/{file}", i) for i, name in enumerate(classes) for file in _pictures(folder / name)]
    if not listed:
        msg = f"{folder} has no folders of images such as n01440764: unpack the archive of each class into its own."
        raise Missing(msg)
    return Images(tuple(folder / name for name, _ in listed), torch.tensor([i for _, i in listed]), view)


def _pictures(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(_IMAGES))


def _from_devkit(home: Path, folder: Path, view: View) -> Images:
    """Return validation images that are in one folder, with the classes that the devkit says."""
    devkit = _first(home, "data", "ILSVRC2012_devkit_t12")
    truth = _first(devkit, "ILSVRC2012_validation_ground_truth.txt")
    try:
        io = importlib.import_module("scipy.io")
    except ImportError as error:
        msg = f"{devkit / 'meta.mat'} is read with scipy: pip install scipy, or sort {folder} into folders of classes."
        raise Missing(msg) from error
    synsets = io.loadmat(_first(devkit, "meta.mat"), squeeze_me=True)["synsets"]
    names = {int(each["ILSVRC2012_ID"]): str(each["WNID"]) for each in synsets}
    numbers = [int(words[0]) for words in _words(truth)]
    leaves = sorted(names[i] for i in names if i <= 1000)  # what follows are groups of classes
    files = _pictures(folder)
    if len(files) != len(numbers):
        msg = f"{folder} has {len(files):,} images and {truth} has {len(numbers):,} lines: unpack the images again."
        raise Missing(msg)
    targets = torch.tensor([leaves.index(names[number]) for number in numbers])
    return Images(tuple(folder / name for name in files), targets, view)


def read_places(data: Path | None, view: View) -> Images:
    """Return the validation images of Places365, 256 pixels wide, with the numbers of their classes."""
    folder = _folder(data, "places365")
    listed = _first(folder, "places365_val.txt", "filelist_places365-standard")
    lines = _words(listed)
    files = _there(_first(folder, "val_256"), [words[0] for words in lines], listed)
    return Images(files, torch.tensor([int(words[1]) for words in lines]), view)
