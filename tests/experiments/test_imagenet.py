"""The experiment on ImageNet runs from files as they are distributed to a page, at a toy size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nullbayes.experiments import find, imagenet, imagenet_page
from nullbayes.experiments.frame import Missing, Settings, Store
from nullbayes.experiments.swin import Swin
from nullbayes.page import Table, Value
from support.image_folders import make_imagenet, make_places, whole_run

pytest.importorskip("PIL", reason="images are read with Pillow")
pytestmark = pytest.mark.cpu

SMALL = {"outputs": 3, "window": 2, "width": 4, "depths": (2, 1), "heads": (1, 2)}
TINY = imagenet.Sizes(
    pixels=16, shorter=18, rows=10, test=8, held_out=40, samples=3, sweeps=15, block=4, batch_size=16, network=SMALL
)
CLASSES = ("n01440764", "n01443537", "n02000000")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    make_imagenet(data, CLASSES, 4, 20)
    make_imagenet(data, CLASSES, 21, 20, "val")
    make_places(data, 9, 20)
    torch.manual_seed(0)
    (data / "weights").mkdir()
    torch.save({"model": Swin(image=16, **SMALL).state_dict()}, data / "weights" / "swin_tiny_patch4_window7_224.pth")
    return data


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(imagenet, TINY, data, tmp_path_factory.mktemp("run"))


def test_no_image_is_both_held_out_and_judged(settings: Settings) -> None:
    found = imagenet.read_photographs(settings, TINY)
    assert {name: len(part) for name, part in found.named().items()} == {
        "training": 12, "rows": 10, "validation": 40, "test": 8, "Places365": 8,
    }  # fmt: skip
    assert not set(found.validation.files) & set(found.test.files)
    assert all(
        path.parent.name == CLASSES[int(y)] for path, y in zip(found.test.files, found.test.targets, strict=True)
    )


def test_figures_of_the_network_are_those_of_its_probabilities(settings: Settings, results: dict[str, Any]) -> None:
    model = imagenet.published(settings, TINY)
    found = imagenet.read_photographs(settings, TINY)
    with torch.no_grad():
        probs = torch.stack([model(x[None])[0].double().softmax(0) for x, _ in found.test])
        strange = [1 - float(model(x[None])[0].double().softmax(0).max()) for x, _ in found.strangers["Places365"]]
    y, own = found.test.targets, results["methods"]["MAP"][0]
    right = probs.argmax(1) == y
    known = (1 - probs.amax(1)).tolist()
    assert own["accuracy"] == pytest.approx(float(right.double().mean()))
    assert own["nll"] == pytest.approx(float(-probs[torch.arange(len(y)), y].log().mean()))
    assert own["brier"] == pytest.approx(float((probs - torch.eye(3)[y]).square().sum(1).mean()))
    assert own["confidence"] == pytest.approx(float(probs.amax(1).mean()))
    wins = [(b > a) + 0.5 * (b == a) for a in known for b in strange]
    assert own["auroc"]["max_probability"] == pytest.approx(sum(wins) / len(wins))


def test_the_posterior_is_judged_by_three_scores(results: dict[str, Any]) -> None:
    ours = results["methods"]["Loss-projected"][0]
    assert set(ours["auroc"]) == set(imagenet_page.SCORES)
    assert all(0 <= auroc <= 1 for auroc in ours["auroc"].values())
    assert 0 <= ours["residual"] < 1
    assert ours["accuracy"] == pytest.approx(results["methods"]["MAP"][0]["accuracy"], abs=0.15)


def test_a_second_run_repeats_nothing_and_finds_the_same(settings: Settings, results: dict[str, Any]) -> None:
    assert settings.store is not None
    said: list[str] = []
    again = dataclasses.replace(settings, store=Store(settings.store.folder, said.append))
    assert imagenet.run(again, TINY) == results
    assert len(said) == 2
    assert all("done before" in line for line in said)


def test_the_page_has_the_papers_figures_beside_ours(results: dict[str, Any]) -> None:
    made = find("imagenet").page(json.loads(json.dumps(results)))
    first, second = (section.blocks[0] for section in made.sections[:2])
    assert isinstance(first, Table)
    assert isinstance(second, Table)
    nll = results["methods"]["MAP"][0]["nll"]
    assert first.rows[0][2] == Value(nll, None, 1.358)
    assert second.rows[1][2] == Value(results["methods"]["Loss-projected"][0]["auroc"]["max_variance"], None, 0.756)
    assert all(len(row) == len(table.columns) for table in (first, second) for row in table.rows)


def test_the_page_of_a_run_names_both_methods_and_counts_the_images(folder: Path) -> None:
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert all(f">{name}<" in html for name in ("MAP", "Loss-projected", "Places365", "validation"))


def test_the_estimate_grows_with_the_number_of_rows(settings: Settings) -> None:
    few, many = (imagenet.estimate(settings, dataclasses.replace(TINY, rows=n)) for n in (10, 100_000))
    assert 0 < 10 * few.seconds < many.seconds
    assert few.memory < many.memory
    assert many.note.startswith("100,000 rows over ")


def test_the_estimate_counts_what_a_batch_keeps_on_its_way_through_the_network(settings: Settings) -> None:
    one, more = (imagenet.estimate(settings, dataclasses.replace(TINY, batch_size=n)) for n in (1, 101))
    model = imagenet.published(settings, TINY)
    kept = [0]
    for module in model.modules():  # a lower bound: what goes into layers with weights, in float32
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, x: kept.append(4 * x[0].numel()))
    model(torch.zeros(1, 3, 16, 16))
    assert sum(kept) <= (more.memory - one.memory) / 100 <= 50 * sum(kept)


def test_weights_of_another_network_are_refused_by_name(settings: Settings) -> None:
    wider = dataclasses.replace(TINY, network={**SMALL, "width": 8})
    with pytest.raises(Missing, match=r"swin_tiny_patch4_window7_224\.pth does not hold .* patch_embed\.proj\.weight"):
        imagenet.published(settings, wider)


def test_without_weights_the_experiment_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"needs weights/swin_tiny_patch4_window7_224\.pth, .* --data FOLDER"):
        imagenet.run(Settings(data=tmp_path), TINY)
