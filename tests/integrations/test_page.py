"""The examples of docs/integrations.md run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = dict(
    re.findall(r"(?ms)^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"))
)
NEEDS = {
    "scikit-learn": ["sklearn"],
    "Lightning": ["lightning"],
    "Hugging Face Trainer": ["transformers", "accelerate"],
    "torch.export and ONNX": ["onnxscript"],
    "torchmetrics": ["torchmetrics"],
    "pandas and matplotlib": ["pandas", "matplotlib"],
}


def test_every_section_has_an_example_that_is_run() -> None:
    assert set(SECTIONS) == set(NEEDS)


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")  # of other packages; networks in the examples are not trained
@pytest.mark.parametrize("title", NEEDS)
def test_example_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[title]:
        pytest.importorskip(package, reason=f"the example needs {package}")
    monkeypatch.chdir(tmp_path)
    exec(compile(SECTIONS[title], PAGE.name, "exec"), {"__name__": "__main__"})
