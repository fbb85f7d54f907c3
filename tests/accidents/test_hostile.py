"""Loading a file runs nothing of it: no pickle, no class by its name, no promise of memory."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError
from support.models import MLP
from support.posterior_files import rewritten
from support.processes import python


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def claiming(n_bytes: int) -> bytes:
    """A safetensors file whose header promises more than there is."""
    shape = [2, n_bytes // 16]
    text = json.dumps({
        "__metadata__": {"nullbayes": '{"format_version": 5}'},
        "directions": {"dtype": "F64", "shape": shape, "data_offsets": [0, n_bytes]},
    }).encode()  # fmt: skip
    return len(text).to_bytes(8, "little") + text + b"\0" * 64


MODULE = "stranger"  # lies in the folder, ready to be imported
NAMES = {
    "kind": {"kind": f"{MODULE}.Posterior"},
    "a call": {"kind": f"__import__('{MODULE}')"},
    "likelihood": {"likelihood": {"name": f"{MODULE}.loss", "sigma_noise": None}},
    "a call in the likelihood": {"likelihood": {"name": f"__import__('{MODULE}')", "sigma_noise": None}},
    "a projector": {"report": f"{MODULE}.Projector"},
    "a module of its own": {"__class__": MODULE, "py/object": f"{MODULE}.Posterior", "_target_": f"{MODULE}.f"},
}


@pytest.fixture
def hostile(saved: Path, tmp_path: Path) -> tuple[dict[str, Path], Path]:
    """Files that would touch a witness if anything in them were run, and the witness."""
    witness, good = tmp_path / "it ran", saved.read_bytes()
    paths = {
        name: tmp_path / f"{name}.safetensors"
        for name in ("pickle", "torch", "old torch", "zip", "in metadata", *NAMES, "2**60 bytes", "2**60 of header")
    }
    with paths["pickle"].open("wb") as file:
        pickle.dump({"directions": Trap(witness)}, file)
    torch.save({"directions": Trap(witness)}, paths["torch"])
    torch.save({"directions": Trap(witness)}, paths["old torch"], _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(paths["zip"], "w") as file:
        file.writestr("data.pkl", pickle.dumps(Trap(witness)))
        file.writestr("__main__.py", f"open({str(witness)!r}, 'w')")
    text = pickle.dumps(Trap(witness), protocol=0).decode()
    save_file(io.read(saved)[0], paths["in metadata"], metadata={"nullbayes": text})
    for name, fields in NAMES.items():
        paths[name].write_bytes(good)
        rewritten(paths[name], lambda tensors, header, fields=fields: header.update(fields))
    paths["2**60 bytes"].write_bytes(claiming(2**60))
    paths["2**60 of header"].write_bytes((2**60).to_bytes(8, "little") + good[8:])
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(witness)!r}, 'w')")
    return paths, witness


def test_hostile_files_are_refused_and_never_run(
    hostile: tuple[dict[str, Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, witness = hostile
    monkeypatch.syspath_prepend(str(witness.parent))
    for name, path in paths.items():
        with pytest.raises(FileError, match=r"not a posterior file|a likelihood of your own"):
            nb.load(path, MLP.build())
        assert not witness.exists(), name
    pickle.loads(paths["pickle"].read_bytes())
    assert witness.exists()  # it would have


AUDITED = """
import sys
import nullbayes as nb
from support.models import MLP

good, *paths = sys.argv[1:]
nb.load(good, MLP.build())  # whatever is imported late is imported now
model, events = MLP.build(), []
RUNS = "exec compile import code cpython ctypes marshal os pickle pty socket subprocess".split()


def hook(event, arguments):
    if watching and event.partition(".")[0] in RUNS:
        events.append((event, arguments))


watching = False
sys.addaudithook(hook)
for path in paths:
    watching, answer = True, None
    try:
        nb.load(path, model)
    except nb.errors.FileError:
        answer = "refused"
    watching = False
    assert answer == "refused", path
    assert not events, (path, events)
watching = True
nb.load(good, model)
watching = False
assert not events, events
watching = True
eval("1 + 1")
watching = False
assert events  # it hears of such things
print("nothing was run by", len(paths), "files")
"""


def test_audit_hooks_see_no_code_run_while_loading(hostile: tuple[dict[str, Path], Path], saved: Path) -> None:
    paths, witness = hostile
    answer = python("-c", AUDITED, saved, *paths.values(), cwd=witness.parent)
    assert answer == f"nothing was run by {len(paths)} files\n"
    assert not witness.exists()


def test_kinds_are_looked_up_in_a_table(saved: Path) -> None:
    for kind in ("SamplePosterior", "NullSpacePosterior", "FitReport", "load", "__name__", "ProjectedPosterior "):
        rewritten(saved, lambda tensors, header, kind=kind: header.update(kind=kind))
        with pytest.raises(FileError, match="kind of its header is"):
            nb.load(saved, MLP.build())
