"""Without the package of an integration, its module can be imported, and says what to install when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
for name in ("sklearn", "lightning", "pytorch_lightning", "transformers", "onnxscript"):
    sys.modules[name] = None  # an import of it fails
import torch
from nullbayes.integrations import lightning, sklearn, transformers
from nullbayes.integrations.export import ExportedPrediction
program = ExportedPrediction(None, (), (), "", True)
makers = [sklearn.NullBayesClassifier, sklearn.NullBayesRegressor]
makers += [lightning.PosteriorCallback, transformers.PosteriorCallback, lambda: program.to_onnx("x.onnx")]
for make in makers:
    try:
        make()
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.cpu
@pytest.mark.slow
def test_missing_packages_are_named() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = run.stdout.splitlines()
    assert [line.split()[0] for line in found] == ["ImportError"] * 4 + ["ModelError"]
    wanted = ["sklearn", "sklearn", "lightning", "transformers", "onnx"]
    assert [line.rpartition("nullbayes[")[2] for line in found] == [f"{name}]'." for name in wanted]
