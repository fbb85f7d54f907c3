"""The tutorials run from top to bottom, draw their pictures, and decide as their pages say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import tutorials

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers.*"),
    pytest.mark.cpu,  # pages show what they print on a CPU
]
NEEDS = {"text-classification": "transformers"}
NAMES = tutorials.names()
each_tutorial = pytest.mark.parametrize("name", NAMES)

# Sizes for a quick run; the pages have those that a reader sees.
SMALL: dict[str, dict[str, int]] = {
    "active-learning": {"REPEATS": 1, "ROUNDS": 2, "STEPS": 80},
    "image-classifier": {"TRAIN": 300, "EPOCHS": 10},
    "lora": {"TRAIN": 100, "EPOCHS": 60},
    "projectors-on-a-matrix": {"LARGE": 32, "SAMPLES": 50},
    "segmentation": {"TRAIN": 20, "HELD_OUT": 100, "TEST": 20, "EPOCHS": 60},
    "tabular-regression": {},
    "text-classification": {"TRAIN": 20, "HELD_OUT": 20, "TEST": 20, "STEPS": 40},
    "threshold-in-production": {"TRAIN": 300, "REQUESTS": 600, "EPOCHS": 60},
}


def image_classifier(names: dict[str, Any]) -> None:
    assert names["posterior"].report.n_data == names["TRAIN"]
    assert names["check"].accuracy_posterior >= names["check"].accuracy_model - 0.003
    assert names["check"].nll_posterior <= names["check"].nll_model + 0.005
    assert names["auroc"] > 0.8
    assert names["alarms"] < 0.1
    assert names["flagged"] > 0.4


def tabular_regression(names: dict[str, Any]) -> None:
    assert 0.78 <= names["coverage"] <= 1.0
    assert 0.75 <= names["calibrated_coverage"] < 1.0
    assert 0.88 <= sum(names["shares"]) / len(names["shares"]) < 0.94
    assert names["std"][-1] > 2 * names["std"][0]
    assert names["flagged"][0] < 0.15
    assert names["flagged"][-1] > 0.9
    assert names["answer"](names["patient"]).startswith("between")
    assert names["answer"](names["typing_error"]).startswith("unlike")


def text_classification(names: dict[str, Any]) -> None:
    assert names["check"].accuracy_posterior == names["check"].accuracy_model > 0.9
    assert names["auroc"] > 0.7
    assert names["alarms"] < 0.2
    assert names["flagged"] > 0.3


def segmentation(names: dict[str, Any]) -> None:
    assert names["check"].accuracy_posterior == names["check"].accuracy_model > 0.95
    assert names["alarms"] < 0.3
    assert names["flagged"] > 0.9
    assert names["inside"] > 2 * names["outside"]
    assert names["stain_flagged"] > 0.5 > names["rest_flagged"]


def lora(names: dict[str, Any]) -> None:
    assert names["after"] > names["before"] + 0.2
    adapters = sum(p.numel() for name, p in names["model"].named_parameters() if name.endswith((".up", ".down")))
    assert names["posterior"].report.n_parameters == adapters
    assert names["frozen"]
    assert names["varied"]
    assert names["flagged"]["mirrored (familiar)"] < 0.15
    assert names["flagged"]["noise"] > 0.9


def threshold_in_production(names: dict[str, Any]) -> None:
    assert names["error"] < 1e-3
    assert names["before"] < 0.12
    assert names["after"] > 2 * names["before"]
    assert names["over"][0] >= names["dirty"]


def active_learning(names: dict[str, Any]) -> None:
    assert {len(set(labelled)) for several in names["runs"].values() for _, labelled, _ in several} == {
        names["FIRST"] + names["ROUNDS"] * names["EACH"]
    }
    assert names["errors"]["by posterior"][-1] < names["errors"]["at random"][-1]


def projectors_on_a_matrix(names: dict[str, Any]) -> None:
    import numpy as np

    matrix = names["A"].numpy()
    assert names["info"].rank == np.linalg.matrix_rank(matrix)
    projection = np.eye(matrix.shape[1]) - np.linalg.pinv(matrix) @ matrix
    for name, part in names["unknown"].items():
        weights = names["questions"][name].flatten().numpy()
        assert part == pytest.approx(np.linalg.norm(projection @ weights) / np.linalg.norm(weights), abs=1e-6)
    assert names["found"].info.converged.all()


CLAIMS: dict[str, Callable[[dict[str, Any]], None]] = {
    claim.__name__.replace("_", "-"): claim
    for claim in (
        image_classifier, tabular_regression, text_classification, segmentation, lora, threshold_in_production,
        active_learning, projectors_on_a_matrix,
    )
}  # fmt: skip


def page(name: str) -> str:
    return (tutorials.FOLDER / f"{name}.md").read_text(encoding="utf-8")


@each_tutorial
def test_a_tutorial_runs_and_decides(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "sklearn"))
    found = tutorials.run(name, tmp_path, SMALL[name])
    CLAIMS[name](found.names)
    picture = (tmp_path / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


@pytest.mark.slow
@each_tutorial
def test_a_page_shows_what_its_blocks_print(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "sklearn"))
    found = tutorials.run(name, tmp_path)
    CLAIMS[name](found.names)
    for (code, shown), printed in zip(tutorials.blocks(page(name)), found.outputs, strict=True):
        assert not tutorials.differences(shown, printed), code


@each_tutorial
def test_a_page_ends_with_a_small_picture_and_a_decision(name: str) -> None:
    text = page(name)
    assert f"]({name}.png)" in text
    assert (tutorials.FOLDER / f"{name}.png").stat().st_size < 60_000
    assert any(word in text for word in ("is_ood", "predict_set", "predict_interval", "answer it", "Stop:"))


@each_tutorial
def test_sizes_are_in_the_first_block(name: str) -> None:
    code, _ = tutorials.blocks(page(name))[0]
    assert {*SMALL[name], "SEED"} <= tutorials.constants(code)


@each_tutorial
def test_lines_can_be_reviewed(name: str) -> None:
    text = re.sub(r"(?ms)^```text.*?^```", "", page(name))
    assert not [line for line in text.splitlines() if len(line) > 120]


def test_the_index_names_every_tutorial() -> None:
    assert set(re.findall(r"\((\S+)\.md\)", page("index"))) == set(NAMES) == set(CLAIMS) == set(SMALL)


@each_tutorial
def test_links_of_a_tutorial_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page(name))
    assert not [link for link in links if not (tutorials.FOLDER / link).exists()]


def test_outputs_are_written_after_their_blocks() -> None:
    text = "a\n\n```python\nx = 1\n```\n\nb\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n\nc\n"
    assert tutorials.blocks(text) == [("x = 1\n", ""), ("print(x)\n", "2\n")]
    assert tutorials.written(text, ("", "1\n")) == text.replace("2", "1")
    assert tutorials.written(text, ("0\n", "")) == (
        "a\n\n```python\nx = 1\n```\n\n```text\n0\n```\n\nb\n\n```python\nprint(x)\n```\n\nc\n"
    )


def test_other_sizes_replace_those_of_the_page() -> None:
    assert "EPOCHS = 3" in tutorials.replaced("import a\nEPOCHS = 20  # rounds\nN = 2\n", {"EPOCHS": 3})
    with pytest.raises(ValueError, match="sets ROUNDS 0 times"):
        tutorials.replaced("EPOCHS = 20\n", {"ROUNDS": 3})


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("flagged 0.90, 700 examples", "flagged 0.92, 700 examples", True),
        ("flagged 0.90", "flagged 0.60", False),
        ("between -1.2 and 3,000", "between -1.3 and 3,100", True),
        ("between -1.2 and 0.9", "between 1.2 and 0.9", False),
        ("CONVERGED", "STAGNATED", False),
        ("true 1", "true 1 2", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(shown: str, printed: str, same: bool) -> None:
    assert (not tutorials.differences(shown, printed)) == same
