"""A posterior class that is defined outside the library is saved and loaded without an edit inside it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes import baselines, io
from nullbayes.baselines.method import FitContext, Learned, Method, Question
from nullbayes.errors import FileError, SettingsError
from nullbayes.jacobian.network import Network
from nullbayes.posteriors import SamplePosterior
from support import recipes
from support.method_table import X_NEW
from support.models import CLASSIFICATION, MLP, batches

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here


@dataclass(frozen=True)
class Isotropic(Method[Tensor]):
    """Independent noise, of the size of the parameters of each tensor; the score is the length of the gradients."""

    relative: float = 0.1

    of_predictions = ("max_variance",)
    own_score = "gradient"

    def __post_init__(self) -> None:
        if self.relative <= 0:
            msg = f"relative must be positive, not {self.relative}."
            raise SettingsError(msg)

    def fit(self, context: FitContext) -> Learned[Tensor]:
        sizes = torch.cat([t.norm().expand(t.numel()) for t in context.network.model.state_dict().values()])
        return Learned(self.relative * sizes, None, "noise of the size of each tensor")

    def deviations(self, state: Tensor, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(n_samples, len(state), generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(state) * state / alpha**0.5

    def score_rows(self, state: Tensor, rows: Tensor, question: Question) -> Tensor:
        return rows.flatten(1).norm(dim=1)

    def tensors(self, state: Tensor) -> dict[str, Tensor]:
        return {"sizes": state}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> Tensor:
        return tensors["sizes"]


class Noise(baselines.Baseline):
    """A baseline that the library knows nothing of."""

    _method = Isotropic()

    def __init__(self, model: nn.Module, likelihood: Any = "classification", *, relative: float = 0.1, **options: Any):
        super().__init__(model, likelihood, **options)
        self._method = Isotropic(relative)


def fit_noise(model: nn.Module, relative: float = 0.2) -> Noise:
    generator = torch.Generator().manual_seed(0)
    return Noise(model, relative=relative).fit([CLASSIFICATION.data()], 4, generator=generator, progress=False)


def test_a_baseline_of_ones_own_needs_no_edit_in_the_library(tmp_path: Path) -> None:
    model = MLP.build()
    posterior = fit_noise(model)
    assert posterior.predict(X_NEW).samples.shape == (4, 4, 3)
    assert posterior.check_fit([CLASSIFICATION.data()]).std > 0
    assert posterior.report.reason == "noise of the size of each tensor"
    assert (posterior.ood_score(X_NEW) > 0).all()
    torch.testing.assert_close(posterior.ood_score(X_NEW, "max_variance"), posterior.predict(X_NEW).variance.amax(1))
    posterior.save(tmp_path / "posterior")
    made = [nb.load(tmp_path / "posterior", model), copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))]
    for other in made:
        assert type(other) is Noise
        assert other._method == Isotropic(0.2)
        assert other.report == posterior.report
        assert torch.equal(other.predict(X_NEW).samples, posterior.predict(X_NEW).samples)
        assert torch.equal(other.ood_score(X_NEW), posterior.ood_score(X_NEW))
        other.prior_precision = 4.0
        torch.testing.assert_close(other.predict(X_NEW).variance, posterior.predict(X_NEW).variance / 4.0)
    assert posterior.optimize_prior_precision([CLASSIFICATION.data()], "grid") == posterior.prior_precision
    with pytest.raises(SettingsError, match="Noise has no marginal likelihood"):
        posterior.optimize_prior_precision(method="marglik")


def test_the_recipe_for_contributors_works(tmp_path: Path) -> None:
    """Its class is in the table of methods, too, for the contract tests."""
    model = MLP.build()
    with pytest.raises(SettingsError, match="scale must be a positive number"):
        recipes.RelativeNoise(model, scale=-1.0)
    posterior = recipes.RelativeNoise(model, scale=0.2).fit([CLASSIFICATION.data()], 3, progress=False)
    variance = posterior.predict(X_NEW).variance
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model)
    assert type(loaded) is recipes.RelativeNoise
    assert torch.equal(loaded.predict(X_NEW).variance, variance)


@pytest.mark.parametrize("settings", [{}, {"relative": 0.1, "more": 1}, {"relative": -1.0}, {"relative": "much"}])
def test_settings_of_a_file_are_those_of_the_method(settings: dict[str, Any], tmp_path: Path) -> None:
    model = MLP.build()
    fit_noise(model).save(tmp_path / "posterior")
    tensors, header = io.read(tmp_path / "posterior")
    io.save(tmp_path / "posterior", tensors, {**header, "settings": settings})
    with pytest.raises(FileError, match="not those of a Noise of this model: it was altered"):
        nb.load(tmp_path / "posterior", model)


def test_drawing_is_explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the fit, and when the prior precision changes; never because something is read."""
    drawn: list[float] = []
    original = Isotropic.deviations

    def counted(self: Isotropic, state: Tensor, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        drawn.append(alpha)
        return original(self, state, network, seed, n_samples, alpha)

    monkeypatch.setattr(Isotropic, "deviations", counted)
    posterior = fit_noise(MLP.build())
    assert drawn == [1.0]
    posterior.prior_precision = 4.0
    _ = posterior.directions, posterior.predict(X_NEW), posterior.sample(), posterior.report, repr(posterior)
    posterior.prior_precision = 4.0
    assert drawn == [1.0, 4.0]
    x, y = CLASSIFICATION.data(n=9)
    best = posterior.optimize_prior_precision(batches(x, y, (4, 5)), "grid")
    assert drawn[2:] == [0.1, 1.0, 5.0, 10.0, 50.0, 100.0, best]  # once for each, however many batches there are


def test_a_search_for_the_precision_changes_nothing_until_it_has_found_one(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, seen = fit_noise(MLP.build()), []
    before = posterior.directions

    def watched(state: Any, question: Question) -> Any:
        seen.append((posterior.prior_precision, posterior.directions is before))
        return Method.predict(posterior._method, state, question)

    monkeypatch.setattr(Isotropic, "predict", lambda self, state, question: watched(state, question))
    posterior.optimize_prior_precision([CLASSIFICATION.data()], "grid")
    assert len(seen) >= 6
    assert set(seen) == {(1.0, True)}


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
    tensors, header = io.read(tmp_path / "posterior")
    for name in ("Baseline", "NullSpacePosterior", "SamplePosterior", "object", ""):
        io.save(tmp_path / "posterior", tensors, {**header, "kind": name})
        with pytest.raises(FileError, match="kind of its header is"):
            nb.load(tmp_path / "posterior", model)
