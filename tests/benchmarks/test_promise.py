"""The case ``promise``: the data that it reads, its own temperature scaling, its verdicts, and parts not there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nullbayes.experiments import datasets, text

runner = importlib.import_module("benchmarks.run")
promise = runner.load_case("promise")
CPU = torch.device("cpu")


@pytest.fixture
def uci(tmp_path: Path) -> Path:
    """A folder with small files in the format of the regressions."""
    rng = np.random.default_rng(0)
    for name in ("concrete", "energy", "yacht"):
        here = tmp_path / "uci" / name
        here.mkdir(parents=True)
        x = rng.normal(3.0, 2.0, (40, 2))
        np.savetxt(here / "data.txt", np.column_stack([x, np.full(40, 7.0), x.sum(1) + rng.normal(0, 0.3, 40)]))
        np.savetxt(here / "index_features.txt", [0, 1, 2], fmt="%d")
        np.savetxt(here / "index_target.txt", [3], fmt="%d")
        np.savetxt(here / "index_train_0.txt", np.arange(30), fmt="%d")
        np.savetxt(here / "index_test_0.txt", np.arange(30, 40), fmt="%d")
    return tmp_path


def run(parts: str, data: Path | None, **overrides: str) -> dict[str, object]:
    return runner.run_case(
        "promise", size="small", device=CPU, data=data, seed=0, overrides={"parts": parts, **overrides}
    )


def test_regressions_are_standardized_with_the_training_part(uci: Path) -> None:
    x, y, x_test, y_test = datasets.read_uci(uci, "yacht", 0)
    assert [tuple(part.shape) for part in (x, y, x_test, y_test)] == [(30, 3), (30, 1), (10, 3), (10, 1)]
    torch.testing.assert_close(x.mean(0), torch.zeros(3), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(x.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), rtol=0.0, atol=1e-5)
    raw = np.loadtxt(uci / "uci" / "yacht" / "data.txt")[:, 3]
    assert float(y_test[4]) == pytest.approx((raw[34] - raw[:30].mean()) / raw[:30].std(), abs=1e-5)


def test_cifar_has_a_test_part_or_none(tmp_path: Path) -> None:
    (tmp_path / "cifar10-small").mkdir()
    images, labels = np.zeros((2, 32, 32, 3), np.uint8), np.array([3, 4], np.uint8)
    path = tmp_path / "cifar10-small" / "data.npz"
    np.savez(path, x_train=images, y_train=labels)
    assert datasets.read_color(tmp_path, "cifar10", "test") is None
    np.savez(path, x_train=images, y_train=labels, x_test=images[:1], y_test=labels[1:])
    assert datasets.read_color(tmp_path, "cifar10", "test")[1].tolist() == [4]


def test_queries_have_the_numbers_of_their_intents(tmp_path: Path) -> None:
    (tmp_path / "clinc150").mkdir()
    splits = {"train": [["a", "walk"], ["b", "run"]], "oos_test": [["c", "oos"]]}
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(splits))
    found = text.read_clinc(tmp_path)
    assert (found["train"][0], found["train"][1].tolist(), found["oos_test"][1].tolist()) == (["a", "b"], [1, 0], [-1])


def test_padding_does_not_count_in_the_mean_over_the_words() -> None:
    class States(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=input_ids[..., None].float().expand(-1, -1, 4))

    model, mask = text.SentenceClassifier(States(), 4, 3), torch.tensor([[1, 1, 0]])
    one, other = (model(torch.tensor([[2, 4, padding]]), mask) for padding in (0, 9))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one, model.head(torch.full((1, 4), 3.0)))


def test_temperature_scaling_finds_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20_000, 5, generator=generator)
    y = torch.multinomial((logits / 2.5).softmax(1), 1, generator=generator)[:, 0]
    held_out, test = (logits[:10_000], y[:10_000]), (logits[10_000:], y[10_000:])
    found = promise._scaled(promise.Task("", nn.Identity(), test, test), held_out)
    assert found["temperature"] == pytest.approx(2.5, rel=0.05)
    assert found["test_nll"] == pytest.approx(float(nn.functional.cross_entropy(test[0] / 2.5, test[1])), abs=1e-3)


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ((0.9, 0.9, 0.5), True),
        ((0.9, 0.897, 0.505 - 1e-9), True),
        ((0.9, 0.95, 0.2), True),
        ((0.9, 0.89, 0.5), False),
        ((0.9, 0.9, 0.51), False),
        ((0.92, 0.9, 0.5), False),
        ((None, None, 0.5), True),
        ((None, None, 0.51), False),
    ],
)
def test_verdict_is_what_the_claim_allows(own: tuple[float | None, ...], kept: bool) -> None:
    names = ("train_accuracy", "test_accuracy", "test_nll")
    network = dict(zip(names, (0.9, 0.9, 0.5), strict=True))
    row = promise._judged(dict(zip(names, own, strict=True)), network, 0.003, 0.005, 0.001)
    assert row["kept"] is kept


def test_regressions_are_judged_without_accuracy_and_have_a_coverage(uci: Path) -> None:
    record = run("uci", uci, uci_epochs="2")
    assert [row["method"] for row in record["rows"]] == 3 * ["network", "Projected", "LossProjected"]
    assert all(row["test_accuracy"] is None and 0 <= row["coverage"] <= 1 for row in record["rows"])
    assert [row["kept"] is None for row in record["rows"]] == 3 * [True, False, False]


def test_missing_parts_are_reported_and_stop_no_other_part(uci: Path) -> None:
    record = run("resnet20+minilm+uci", uci, uci_epochs="1")
    assert record["rows"]
    assert "resnet20-12fca82f.th" in record["notes"][0]
    assert "data_full.json" in record["notes"][1]
    assert "uci is left out" in run("uci", None)["skipped"]
    assert "there are digits, " in run("digitz", None)["skipped"]
