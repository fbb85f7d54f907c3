"""Weights are found where training scripts put them, and only tensors are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nullbayes.command.frame import Console, Refusal
from nullbayes.command.weights import load_weights

pytestmark = pytest.mark.cpu


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).cpu()


TRAINED = network()
STATE = TRAINED.state_dict()
FORMS: dict[str, tuple[Any, str]] = {
    "plain": (STATE, ""),
    "in a checkpoint": ({"epoch": 3, "state_dict": STATE, "optimizer": {}}, 'under "state_dict"'),
    "under model": ({"model": STATE}, 'under "model"'),
    "in parallel": ({f"module.{name}": value for name, value in STATE.items()}, 'begin with "module."'),
    "compiled": ({f"_orig_mod.{name}": value for name, value in STATE.items()}, 'begin with "_orig_mod."'),
    "both": ({"state_dict": {f"module.{name}": value for name, value in STATE.items()}}, "begin with"),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_found(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, told = FORMS[form]
    torch.save(saved, tmp_path / "w.pt")
    model = network()
    load_weights(model, tmp_path / "w.pt", Console())
    assert all(torch.equal(value, STATE[name]) for name, value in model.state_dict().items())
    printed = capsys.readouterr().err
    assert told in printed
    assert bool(printed) is bool(told)


def test_weights_of_safetensors_are_read(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "w.safetensors")
    model = network()
    load_weights(model, tmp_path / "w.safetensors", Console())
    assert all(torch.equal(value, STATE[name]) for name, value in model.state_dict().items())


class Secret:
    """What a pickle could run."""


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"model": Secret()}, "holds more than tensors"),
        (TRAINED, "holds more than tensors"),
        ([1, 2], "holds no weights by name"),
        ({**STATE, "0.weight": torch.zeros(4, 9, device="cpu")}, "0.weight is (4, 9) instead of (4, 3)"),
        ({name: value for name, value in STATE.items() if "0" not in name}, "missing are 0.weight, 0.bias"),
        ({**STATE, "3.bias": torch.zeros(1, device="cpu")}, "unknown are 3.bias"),
        (b"no file of torch", "cannot be read as weights"),
    ],
)
def test_other_files_are_refused(saved: Any, told: str, tmp_path: Path) -> None:
    path, model = tmp_path / "w.pt", network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path.write_bytes(saved) if isinstance(saved, bytes) else torch.save(saved, path)
    with pytest.raises(Refusal) as refused:
        load_weights(model, path, Console())
    assert told in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
