"""Images of CelebA, Food-101, ImageNet and Places365 are read from the files in which they are distributed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nullbayes.experiments import folders
from nullbayes.experiments.folders import View
from nullbayes.experiments.frame import Missing
from support.image_folders import ATTRIBUTES, make_celeba, make_food, make_imagenet, make_places, make_validation

pytestmark = pytest.mark.cpu
Image = pytest.importorskip("PIL.Image", reason="images are read with Pillow")
VIEW = View(8, 10)


def test_an_image_is_its_central_square_resized_and_normalized(tmp_path: Path) -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)  # wide: 10 by 20 after resizing, of which columns 6 to 13 are kept
    pixels[:, 12:28] = (255, 128, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = VIEW.of(tmp_path / "a.png")
    assert found.shape == (3, 8, 8)
    color = (np.array([255, 128, 0]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(found[:, 4, 4], color, atol=1e-5)
    np.testing.assert_allclose(found[:, 1, 2:6], np.tile(color[:, None], 4), atol=0.05)
    assert torch.equal(found, VIEW.of(tmp_path / "a.png"))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA"])
def test_images_of_other_color_modes_have_three_channels(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (12, 9)).save(tmp_path / "a.tiff")
    assert VIEW.of(tmp_path / "a.tiff").shape == (3, 8, 8)


def test_batches_hold_the_images_of_their_numbers(tmp_path: Path) -> None:
    make_places(tmp_path, 7, 12)
    images = folders.read_places(tmp_path, VIEW)
    x, y = (torch.cat(parts) for parts in zip(*DataLoader(images, batch_size=3), strict=True))
    assert torch.equal(x, torch.stack([VIEW.of(path) for path in images.files]))
    assert y.tolist() == [7 * i % 365 for i in range(7)]
    some = images.some(4, seed=1)
    assert len(some) == 4
    assert list(some.files) == sorted(some.files)
    assert all(images.targets[images.files.index(path)] == y for path, y in zip(some.files, some.targets, strict=True))
    assert images.some(7) is images


def test_celeba_is_read_with_its_attributes_and_splits(tmp_path: Path) -> None:
    faces = [(0, ("Bald", "Young")), (2, ()), (1, ("Smiling",))]
    make_celeba(tmp_path, faces)
    found = folders.read_celeba(tmp_path, VIEW)
    assert found.attributes == ATTRIBUTES
    assert found.split.tolist() == [0, 2, 1]
    assert found.images.targets.tolist() == [[float(name in has) for name in ATTRIBUTES] for _, has in faces]
    assert found.has("Smiling").tolist() == [False, False, True]
    assert [path.name for path in found.images.files] == ["000001.jpg", "000002.jpg", "000003.jpg"]

    home = tmp_path / "celeba"  # as the folders of the download are
    for name, folder in {
        "list_attr_celeba.txt": "Anno",
        "list_eval_partition.txt": "Eval",
        "img_align_celeba": "Img",
    }.items():
        (home / folder).mkdir()
        shutil.move(home / name, home / folder / name)
    again = folders.read_celeba(tmp_path, VIEW)
    assert torch.equal(again.images.targets, found.images.targets)
    assert torch.equal(again.images[1][0], VIEW.of(home / "Img" / "img_align_celeba" / "000002.jpg"))


def test_food_and_imagenet_number_their_classes_in_alphabetical_order(tmp_path: Path) -> None:
    make_food(tmp_path, ["waffles/3", "apple_pie/12", "waffles/1"])
    food = folders.read_food(tmp_path, VIEW)
    assert food.targets.tolist() == [1, 0, 1]
    assert [path.name for path in food.files] == ["3.jpg", "12.jpg", "1.jpg"]
    make_imagenet(tmp_path, ["n02", "n01"], 2, 12)
    train = folders.read_imagenet(tmp_path, "train", VIEW)
    assert [(path.parent.name, int(y)) for path, y in zip(train.files, train.targets, strict=True)] == [
        ("n01", 0), ("n01", 0), ("n02", 1), ("n02", 1),
    ]  # fmt: skip


def test_validation_images_without_folders_have_the_classes_of_the_devkit(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    kinds = [(1, "n07"), (2, "n01"), (3, "n05"), (1001, "n00")]  # numbers of the devkit are in no such order
    make_validation(tmp_path, kinds, [2, 1, 3], 12)
    found = folders.read_imagenet(tmp_path, "val", VIEW)
    assert found.targets.tolist() == [0, 2, 1]
    (tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000003.JPEG").unlink()
    with pytest.raises(Missing, match=r"has 2 images and .* has 3 lines"):
        folders.read_imagenet(tmp_path, "val", VIEW)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    make_celeba(tmp_path, [(0, ()), (1, ())])
    (tmp_path / "celeba" / "img_align_celeba" / "000002.jpg").unlink()
    with pytest.raises(Missing, match=r"000002\.jpg, which list_attr_celeba\.txt names, is not there"):
        folders.read_celeba(tmp_path, VIEW)
    with pytest.raises(Missing, match=r"gone\.jpg is not there"):
        VIEW.of(tmp_path / "gone.jpg")


def test_an_unreadable_image_is_named_in_one_sentence_whoever_reads_it(tmp_path: Path) -> None:
    make_places(tmp_path, 3, 12)
    bad = tmp_path / "places365" / "val_256" / "Places365_val_00000002.jpg"
    whole = bad.read_bytes()
    for damaged in (b"no image", whole[: len(whole) // 2]):
        bad.write_bytes(damaged)
        with pytest.raises(Missing, match=r"Places365_val_00000002\.jpg cannot be read as an image") as caught:
            next(iter(DataLoader(folders.read_places(tmp_path, VIEW), batch_size=3)))
        assert "\n" not in str(caught.value)


def test_lists_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    make_celeba(tmp_path, [(0, ()), (1, ())])
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("000001.jpg 0\n")
    with pytest.raises(Missing, match=r"000002\.jpg is not in .*list_eval_partition\.txt"):
        folders.read_celeba(tmp_path, VIEW)


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Missing, match=r"pip install 'nullbayes\[images\]'"):
        VIEW.of(tmp_path / "a.jpg")
