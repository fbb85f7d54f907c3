"""A checkpoint that somebody made up, of another version, or with a trap in it is refused, kept and never run."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from files import rewritten
from nullbayes.errors import FileError
from nullbayes.posteriors.checkpoint import Checkpoint
from posteriors.checkpoints import fit, interrupted, left, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),
    pytest.mark.usefixtures("at_every_sweep"),
]

# written as a checkpoint is, checksums and all, by somebody who means no good
MADE_UP: dict[str, Callable[[dict[str, Any]], Any]] = {
    "problem": lambda header: header.update(problem=["model"]),
    "no problem": lambda header: header.update(problem=None),
    "seed": lambda header: header.update(seed="123"),
    "seed that is none": lambda header: header.update(seed=True),
    "memory": lambda header: header.update(memory=7),
    "memory of another kind": lambda header: header["memory"].update(limit="4GB"),
    "memory with more": lambda header: header["memory"].update(asked=1),
    "memory with less": lambda header: header["memory"].pop("host"),
    "halved backwards": lambda header: header["memory"].update(halvings=-1),
    "nothing to work with": lambda header: header["memory"].update(limit=-1),
}


@pytest.mark.parametrize("change", MADE_UP.values(), ids=MADE_UP)
def test_a_made_up_header_is_refused_and_the_file_kept(change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    before = rewritten(tmp_path / "fit", lambda tensors, header: change(header)).read_bytes()
    with pytest.raises(FileError, match=r"was altered since it was written: delete it, or pass another path"):
        fit(checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a fit that has made no sweep yet."""
    path = tmp_path_factory.mktemp("begun") / "fit"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with contextlib.suppress(KeyboardInterrupt):
            fit(checkpoint=path, generator=seeded())
    return path


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    """The directions of a fit that nobody interrupted."""
    directions: torch.Tensor = fit(generator=seeded()).directions
    return directions


FIELDS = [
    ("seed",), ("problem",), ("memory",), ("kind",), ("memory", "limit"), ("memory", "host"),
    ("memory", "halvings"), ("problem", "plan"), ("problem", "model"), ("problem", "parameters"), ("problem", "new"),
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(field=st.sampled_from(FIELDS), value=json_values)
@example(field=("memory", "halvings"), value=10**9)
@example(field=("memory", "limit"), value=1)
def test_a_field_of_any_json_is_refused_or_does_not_matter(
    field: tuple[str, ...], value: Any, begun: Path, whole: torch.Tensor
) -> None:
    def change(_: Any, header: dict[str, Any]) -> None:
        inner = header if len(field) == 1 else header[field[0]]
        inner[field[-1]] = value

    path = rewritten(Path(shutil.copy(begun, begun.with_name("changed"))), change)
    try:
        posterior = fit(checkpoint=path)
    except FileError:
        assert path.exists()
    else:
        assert field == ("seed",) or torch.equal(posterior.directions, whole)


@pytest.mark.parametrize(("version", "advice"), [(99, "upgrade nullbayes"), (1, "fit and save again")])
def test_a_checkpoint_of_another_version_is_refused_and_kept(version: int, advice: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    before = rewritten(tmp_path / "fit", lambda _, header: header.update(format_version=version)).read_bytes()
    with pytest.raises(FileError, match=f"format version {version}.*{advice}.*To fit anew, delete it"):
        fit(checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.witness,)


def test_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    witness, path = tmp_path / "it ran", tmp_path / "fit"
    for contents in (pickle.dumps(Trap(witness)), pickle.dumps({"counts": Trap(witness)}, protocol=0)):
        path.write_bytes(contents)
        with pytest.raises(FileError, match="not a checkpoint file"):
            fit(checkpoint=path)
        assert path.read_bytes() == contents
    torch.save({"counts": Trap(witness)}, path)
    with pytest.raises(FileError, match="not a checkpoint file"):
        fit(checkpoint=path)
    assert left(tmp_path) == ["fit"]
    torch.load(path, weights_only=False)
    assert witness.exists()  # it would have
