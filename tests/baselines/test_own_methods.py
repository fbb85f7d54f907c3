"""A posterior class that is defined outside the library is saved and loaded without an edit inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from baselines.methods import X_NEW
from models import CLASSIFICATION, MLP
from nullbayes import baselines
from nullbayes.errors import FileError
from nullbayes.posteriors import SamplePosterior

SOURCE = """
from nullbayes.baselines import DiagonalLaplace

class MyLaplace(DiagonalLaplace):
    pass
"""


def test_a_class_can_be_loaded_once_its_module_is_imported(tmp_path: Path) -> None:
    module = ModuleType("mine")
    exec(SOURCE, vars(module))
    model = MLP.build()
    posterior = module.MyLaplace(model).fit([CLASSIFICATION.data()], 3, progress=False)
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model)
    assert type(loaded) is module.MyLaplace
    assert torch.equal(loaded.predict(X_NEW).samples, posterior.predict(X_NEW).samples)
    posterior.save(tmp_path / "posterior")
    module.MyLaplace.__name__ = "Renamed"  # as in a process that has not imported it
    with pytest.raises(FileError, match=r"kind of its header is 'MyLaplace'.*import the module that defines it"):
        nb.load(tmp_path / "posterior", model)


def test_of_two_classes_of_a_name_the_newer_one_is_loaded(tmp_path: Path) -> None:
    """As in a notebook, where a cell was run twice."""
    first, second = ModuleType("first"), ModuleType("second")
    for module in (first, second):
        exec(SOURCE.replace("MyLaplace", "Twice"), vars(module))
    model = MLP.build()
    first.Twice(model).fit([CLASSIFICATION.data()], 3, progress=False).save(tmp_path / "posterior")
    assert type(nb.load(tmp_path / "posterior", model)) is second.Twice


class Fixed(SamplePosterior):
    """The least that a posterior can be: directions that are given."""

    _header_fields = {"comment": lambda value: isinstance(value, str)}  # noqa: RUF012

    def fit(self, directions: Tensor, comment: str) -> Fixed:
        self._directions, self.comment = directions, comment
        return self

    def _header(self) -> dict[str, Any]:
        return {"comment": self.comment}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        self.comment = header["comment"]


def test_a_class_declares_what_it_adds_to_a_header(tmp_path: Path) -> None:
    model = MLP.build()
    posterior = Fixed(model, prior_precision=2.0).fit(torch.eye(51, dtype=torch.float64)[:3], "mine")
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model)
    assert loaded.comment == "mine"
    assert torch.equal(loaded.predict(X_NEW).samples, posterior.predict(X_NEW).samples)
    posterior.comment = 3
    posterior.save(tmp_path / "posterior")
    with pytest.raises(FileError, match="comment of its header is 3"):
        nb.load(tmp_path / "posterior", model)


def test_abstract_classes_cannot_be_loaded(tmp_path: Path) -> None:
    model = MLP.build()
    posterior = baselines.MAP(model).fit([CLASSIFICATION.data()], 1, progress=False)
    posterior.save(tmp_path / "posterior")
    tensors, header = nb.io.read(tmp_path / "posterior")
    for name in ("Baseline", "KernelPosterior", "SamplePosterior", "object", ""):
        nb.io.save(tmp_path / "posterior", tensors, {**header, "kind": name})
        with pytest.raises(FileError, match="kind of its header is"):
            nb.load(tmp_path / "posterior", model)
