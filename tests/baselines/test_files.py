"""Every method can be saved and loaded, and refuses files that are not its own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError
from support.method_table import PROJECTED, Method, answer, each_baseline, each_method
from support.models import CLASSIFICATION, MLP, REGRESSION, Task

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION], ids=lambda task: task.name)
@each_method
def test_a_saved_posterior_answers_the_same(method: Method, task: Task, tmp_path: Path) -> None:
    if task not in method.tasks:
        return
    model = MLP.build(task.outputs)
    posterior = method.fit(task, model=model)
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", copy.deepcopy(model))
    assert type(loaded) is method.kind
    if method.samples or task is CLASSIFICATION:
        assert torch.equal(answer(method, loaded), answer(method, posterior))
    assert loaded.report.to_dict() == posterior.report.to_dict()
    assert loaded.prior_precision == posterior.prior_precision
    loaded.save(tmp_path / "again")
    again = nb.load(tmp_path / "again", model)
    assert torch.equal(answer(method, again), answer(method, posterior))
    if method.prior and method not in PROJECTED:
        loaded.prior_precision = posterior.prior_precision = 7.0
        torch.testing.assert_close(answer(method, loaded), answer(method, posterior), rtol=1e-10, atol=1e-12)


@each_method
def test_a_file_of_another_model_is_refused(method: Method, tmp_path: Path) -> None:
    posterior = method.fit()
    posterior.save(tmp_path / "posterior")
    with pytest.raises(FileError, match="other parameters"):
        nb.load(tmp_path / "posterior", MLP.build(seed=1))
    with pytest.raises(FileError, match="another structure"):
        nb.load(tmp_path / "posterior", nn.Linear(4, 3).double())


@each_baseline
def test_tensors_that_do_not_fit_are_refused(method: Method, tmp_path: Path) -> None:
    """A file whose hash is right, but whose tensors are not those of the method: `Method.restored` refuses them."""
    model = MLP.build()
    method.fit(model=model).save(tmp_path / "posterior")
    tensors, header = io.read(tmp_path / "posterior")
    added = [name for name in tensors if name != "directions"]
    own = [name for name in added if not name.startswith("familiar.")]
    for name in added:
        missing = {other: tensor for other, tensor in tensors.items() if other != name}
        for changed in ([missing] if len(own) > 1 or name not in own else []) + [
            {**tensors, name: tensors[name].flatten()[:-1]}
        ]:
            io.save(tmp_path / "changed", changed, header)
            with pytest.raises(FileError, match="fit and save again"):
                nb.load(tmp_path / "changed", model)
