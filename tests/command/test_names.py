"""What a user names is found where it lies, and nothing else of the folder is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nullbayes.command.data import batches, divided, read_data
from nullbayes.command.frame import Console, Refusal
from nullbayes.command.names import named
from support.user_folder import inside

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine").mkdir()
    for name, text in {
        "mine/__init__.py": "",
        "mine/data.py": "from mine import more\nclass Set:\n    class inner:\n        value = 7\n",
        "mine/more.py": "import neighbour\n",
        "neighbour.py": "value = 1\n",
        "json.py": "raise ImportError('json of the folder')\n",
        "colorsys.py": "value = 3\n",
        "alone.py": "import neighbour\nvalue = neighbour.value + 1\n",
    }.items():
        (tmp_path / name).write_text(text)
    with inside(tmp_path):
        yield tmp_path


def test_modules_files_and_dotted_names_are_found(folder: Path) -> None:
    assert named("mine.data:Set.inner.value", "--data") == 7
    assert named("alone.py:value", "--data") == 2
    assert named(f"{folder}/alone.py:value", "--data") == 2
    assert named("alone:value", "--data") == 2
    assert named("torch.nn:Linear", "--model") is torch.nn.Linear


def test_the_folder_comes_first_for_what_is_named_and_last_for_everything_else(folder: Path) -> None:
    sys.modules.pop("colorsys", None)
    assert named("colorsys:value", "--data") == 3  # the standard library has one, too
    sys.modules.pop("colorsys")
    assert sys.path[-1] == str(folder)
    sys.modules.pop("wave", None)
    (folder / "wave.py").write_text("raise ImportError('wave of the folder')\n")
    import wave

    assert not str(wave.__file__).startswith(str(folder))


def test_the_likeliest_names_come_first_where_one_is_mistyped(folder: Path) -> None:
    (folder / "many.py").write_text("\n".join(f"other_{i} = 0" for i in range(20)) + "\nbuild = 1\n")
    with pytest.raises(Refusal, match=r"many has no 'biuld'; it has build, "):
        named("many:biuld", "--model")


def test_a_module_that_is_hidden_by_another_is_not_taken_for_it(folder: Path) -> None:
    with pytest.raises(Refusal, match=r"json in this folder is hidden by a module of that name: write json\.py:name"):
        named("json:value", "--data")
    with pytest.raises(Refusal, match="json of the folder"):
        named("json.py:value", "--data")
    assert hasattr(sys.modules["json"], "dumps")


@pytest.fixture
def user(folder: Path) -> Path:
    (folder / "sets.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "x, y = torch.arange(12.0, device='cpu')[:, None].expand(12, 2), torch.arange(12, device='cpu')\n"
        "pair, dataset = (x, y), TensorDataset(x, y)\nloader = DataLoader(dataset, batch_size=5)\n"
        "shuffled = DataLoader(dataset, batch_size=5, shuffle=True, drop_last=True)\n"
        "named, listed, inputs = {'x': x, 'labels': y}, [x, y], x\n"
        "def function(): return loader\n"
        "def generator():\n    yield x[:5], y[:5]\n    yield x[5:], y[5:]\n"
    )
    return folder


def targets(data: Any) -> list[int]:
    """The targets of all batches, in order."""
    found = [batch["labels"] if isinstance(batch, dict) else batch[1] for batch in batches(data)]
    return torch.cat(found).tolist()


KINDS = ["pair", "dataset", "loader", "shuffled", "named", "listed", "function", "generator"]


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_any_form_are_read_twice_in_order(kind: str, user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = read_data(f"sets:{kind}", "--data", Console())
    assert targets(data) == targets(data) == list(range(12))
    told = "sets:shuffled shuffles or drops examples: all of them are read, in order.\n"
    assert capsys.readouterr().err == (told if kind == "shuffled" else "")


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_held_out_data_are_disjoint_and_complete(kind: str, user: Path) -> None:
    one, other = divided(read_data(f"sets:{kind}", "--held-out", Console()), 0.4)
    assert targets(one) == targets(one)
    assert sorted(targets(one) + targets(other)) == list(range(12))
    assert 0 < len(targets(one)) < 12
    for batch in one:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        y = batch["labels"] if isinstance(batch, dict) else batch[1]
        assert torch.equal(x[:, 0], y.float())


def test_data_in_one_piece_are_cut(user: Path) -> None:
    x = torch.arange(3000, device="cpu")
    parts = list(batches((x[:, None], x)))
    assert [len(y) for _, y in parts] == [1024, 1024, 952]
    assert [len(part) for part in batches(x[:, None])] == [1024, 1024, 952]
    assert [len(y) for _, y in batches(TensorDataset(x, x))][:2] == [256, 256]
    assert [len(y) for _, y in batches(DataLoader(TensorDataset(x, x), batch_size=2000))] == [1024, 976, 1000]
