"""Residual networks and sentence encoders are studied as LeNet is: real runs on small files in the real formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nullbayes.experiments import find, networks, residual, sentences
from nullbayes.experiments.adapters import LowRank, tune_adapters, with_adapters
from nullbayes.experiments.frame import Missing, Settings, Store
from nullbayes.experiments.networks import ResNet
from nullbayes.page import Gallery, Table

RESIDUAL = residual.ResidualSizes(
    n=20, epochs=1, held_out=40, test=20, shifted=10, samples=3, pictures=1, strengths=1,
    parameters=("linear.*",), only=("MAP", "ProjectedPosterior"),
)  # fmt: skip
TEXT = sentences.TextSizes(
    n=40, epochs=1, held_out=40, test=20, shifted=0, samples=3, pictures=1, length=8, rank=1,
    last="bert.encoder.layer.0.*", only=("MAP", "LossProjectedPosterior"),
)  # fmt: skip
WORDS = ("what", "is", "my", "balance", "play", "a", "song", "book", "flight", "to", "rome", "cats", "sing")
pytestmark = pytest.mark.usefixtures("ordinary_default")


# --- residual networks ------------------------------------------------------------------------------------------------


@pytest.fixture
def color(tmp_path: Path, ordinary_default: None) -> Path:
    """A folder with small files in the formats of the real ones, published weights among them."""
    rng = np.random.default_rng(0)
    for name, splits in (("cifar10-15k", ("train", "test")), ("cifar100-2k", ("test",)), ("svhn-16k", ("test",))):
        arrays: dict[str, Any] = {}
        for split in splits:
            arrays |= {
                f"x_{split}": rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8),
                f"y_{split}": np.arange(60) % 10,
            }
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "data.npz", **arrays)
    torch.manual_seed(0)
    (tmp_path / "weights").mkdir()
    weights = {f"module.{name}": value for name, value in ResNet().state_dict().items()}
    torch.save({"state_dict": weights}, tmp_path / "weights" / "resnet20-12fca82f.th")
    return tmp_path


@pytest.mark.slow
def test_cifar10_studies_a_trained_network_and_the_published_one(color: Path, tmp_path: Path) -> None:
    settings = Settings(data=color, store=Store(tmp_path / "run"), seeds=2)
    found = json.loads(json.dumps(residual.study("cifar10", settings, RESIDUAL), allow_nan=False))
    trained, published = found["subjects"]
    assert [len(trained["runs"]), len(published["runs"])] == [2, 1]  # the published network has one seed
    assert trained["data"] == published["data"] == "cifar10"
    record = published["runs"][0]["methods"]["ProjectedPosterior"]
    assert record["report"]["n_parameters"] == 650
    assert set(record["scores"]["calibrated"]) == {"cifar100", "svhn"}
    assert {name: len(points) for name, points in record["shift"].items()} == {"fog": 2, "Gaussian blur": 2}
    assert [picture["shape"] for made in record["gallery"] for picture in made["pictures"]] == 6 * [[32, 32, 3]]
    assert {part.name for part in (tmp_path / "run" / "weights" / "cifar10").iterdir()} == {
        "seed 0.safetensors", "seed 1.safetensors",
    }  # fmt: skip

    page = find("cifar10").page(found)
    titles = [section.title for section in page.sections]
    assert all(any(title.startswith(subject["name"]) for title in titles) for subject in (trained, published))
    (section,) = (s for s in page.sections if s.title == "ResNet-20, published weights: Strangers")
    table = section.blocks[1]
    assert isinstance(table, Table)
    (row,) = (row for row in table.rows if row[0] == "MAP, svhn")
    assert row[1].mean == 0.874  # type: ignore[union-attr]


def test_missing_weights_leave_one_network_out_and_missing_data_stop(color: Path, tmp_path: Path) -> None:
    (color / "weights" / "resnet20-12fca82f.th").unlink()
    sizes = residual.ResidualSizes(
        n=5, epochs=0, held_out=40, test=5, shifted=2, strengths=1, parameters=("linear.*",), only=("MAP",)
    )
    found = residual.study("cifar10", Settings(data=color, store=Store(tmp_path / "run"), seeds=1), sizes)
    assert [subject["name"] for subject in found["subjects"]] == ["ResNet, cifar10"]
    assert "resnet20-12fca82f.th" in found["notes"][0]
    assert find("cifar10").page(found).sections[-1].paragraphs == found["notes"]
    with pytest.raises(Missing, match="svhn"):
        residual.study("svhn", Settings(data=tmp_path / "nowhere"), sizes)


# --- sentences --------------------------------------------------------------------------------------------------------


@pytest.fixture
def queries(tmp_path: Path, ordinary_default: None) -> Path:
    """Queries of 150 intents, and an encoder of one thin layer with a vocabulary of a few words."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    rng = np.random.default_rng(0)

    def some(n: int, intent: str | None) -> list[list[str]]:
        texts = [" ".join(rng.choice(WORDS[:11] if intent is None else WORDS[5:], 4)) for _ in range(n)]
        return [[text, intent or f"intent {i % 150:03}"] for i, text in enumerate(texts)]

    splits = {"train": some(150, None), "val": some(60, None), "test": some(60, None), "oos_test": some(30, "oos")}
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(splits), encoding="utf-8")
    folder = tmp_path / "minilm"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    config.save_pretrained(folder)
    torch.manual_seed(0)
    encoder = transformers.BertModel(config, add_pooling_layer=False)
    save_file({name: value.contiguous() for name, value in encoder.state_dict().items()}, folder / "model.safetensors")
    return tmp_path


def test_text_studies_head_last_layer_whole_encoder_and_adapters(queries: Path, tmp_path: Path) -> None:
    settings = Settings(data=queries, store=Store(tmp_path / "run"), seeds=1)
    found = json.loads(json.dumps(sentences.study(settings, TEXT, str(queries / "minilm")), allow_nan=False))
    records = {s["name"]: s["runs"][0]["methods"]["LossProjectedPosterior"] for s in found["subjects"]}
    free = {name: record["report"]["n_parameters"] for name, record in records.items()}
    head = 12 * 150 + 150
    assert free["MiniLM, head"] == head
    assert free["MiniLM, LoRA adapters and head"] == head + 2 * (12 + 12)  # of queries and values
    assert head < free["MiniLM, last layer and head"] < free["MiniLM, whole encoder"]
    assert all(set(record["scores"]["calibrated"]) == {"out of scope"} for record in records.values())
    weights = {path.name for path in (tmp_path / "run" / "weights").iterdir()}
    assert weights == {"minilm", "minilm, adapters of rank 1"}  # three subjects share a network
    networks = [s["runs"][0]["methods"]["MAP"]["familiar"]["nll"] for s in found["subjects"]]
    assert networks[0] == networks[1] == networks[2] != networks[3]

    page = find("text").page(found)
    pictures = [
        picture for s in page.sections for block in s.blocks if isinstance(block, Gallery) for picture in block.pictures
    ]
    assert all(picture.text for picture in pictures)
    assert all(set(picture.text.split()) <= set(WORDS) for picture in pictures)


def test_adapters_change_nothing_at_first_and_leave_the_rest_as_it_was() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.other(self.query(x).tanh() * self.value(x)))

    model, x, y = Attention(), torch.randn(30, 4), torch.arange(30) % 3
    before, loss = model(x), nn.functional.cross_entropy
    adapted = with_adapters(model, 2)
    assert isinstance(model.query, LowRank)
    assert torch.equal(adapted(x), before)
    kept = {name: value.clone() for name, value in adapted.named_parameters()}
    tune_adapters(adapted, {"x": x}, y, 20)
    changed = {name for name, value in adapted.named_parameters() if not torch.equal(value, kept[name])}
    assert changed == {
        "query.lora_down.weight", "query.lora_up.weight", "value.lora_down.weight", "value.lora_up.weight",
        "head.weight", "head.bias",
    }  # fmt: skip
    assert loss(adapted(x), y) < loss(before, y)
    with pytest.raises(ValueError, match="query or value"):
        with_adapters(nn.Sequential(nn.Linear(2, 2)), 1)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "svhn", "text"])
@pytest.mark.parametrize("quick", [False, True])
def test_estimate_is_less_for_a_quick_run_and_grows_with_the_seeds(name: str, quick: bool) -> None:
    experiment, gpu = find(name), torch.device("cuda")
    one, three = (experiment.estimate(Settings(quick=quick, seeds=seeds)) for seeds in (1, 3))
    assert one.seconds > 0
    assert one.memory > 0
    assert 1.4 * one.seconds < three.seconds <= 3 * one.seconds
    assert experiment.estimate(Settings(quick=quick, device=gpu)).seconds <= three.seconds
    assert experiment.estimate(Settings(quick=True)).seconds < experiment.estimate(Settings()).seconds


def test_a_cropped_image_is_a_window_of_it_or_of_its_mirror_image_with_zeros_around() -> None:
    images = 1.0 + torch.arange(200 * 3 * 8 * 6, dtype=torch.float32).view(200, 3, 8, 6)
    torch.manual_seed(0)
    places = []
    for image, found in zip(images, networks._cropped(images), strict=True):
        wide = [torch.nn.functional.pad(side, (4, 4, 4, 4)) for side in (image, image.flip(2))]
        windows = {(m, i, j): wide[m][:, i : i + 8, j : j + 6] for m in (0, 1) for i in range(9) for j in range(9)}
        places += [place for place, window in windows.items() if torch.equal(window, found)]
    assert len(places) == len(images)
    mirrored, top, left = (set(each) for each in zip(*places, strict=True))
    assert mirrored == {0, 1}
    assert top == left == set(range(9))
