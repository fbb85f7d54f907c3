"""Every method decides, and a file or a copy of it decides alike; an altered calibration is refused."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes import baselines
from nullbayes.errors import FileError, NotFittedError, SettingsError
from support.method_table import BASELINES, METHODS, PROJECTED, SCORES, Method, each_method
from support.models import CLASSIFICATION, MLP
from support.posterior_files import rewritten

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained
HELD, NEW = CLASSIFICATION.data(n=100, seed=3), CLASSIFICATION.data(n=40, seed=4)[0]


QUICKER = ("ProjectedPosterior", "MAP", "SCOD", "LocalEnsemble", "KNN")  # which stand for the others in `make test`
some_methods = pytest.mark.parametrize(
    "method",
    [m if m.name in QUICKER else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
    ids=lambda method: method.name,
)


@pytest.fixture(autouse=True)
def _needs_curvlinops(request: pytest.FixtureRequest) -> None:
    if "method" in request.fixturenames and request.getfixturevalue("method").kind is baselines.KroneckerLaplace:
        pytest.importorskip("curvlinops")


def default_kind(method: Method) -> str:
    """What a method is calibrated by: the combined score, or the first of its own."""
    return "combined" if method.scores == SCORES else method.scores[0]


def own_score(method: Method) -> str | None:
    """The statistic that is the method's own: a variance, or the score of a method that is nothing else."""
    return "sum_variance" if "sum_variance" in method.scores else None if method.samples else method.scores[0]


def calibrated(method: Method, **how: Any) -> Any:
    return method.fit().calibrate(*HELD, **how)


@each_method
def test_every_method_decides(method: Method) -> None:
    posterior = calibrated(method)
    kind = default_kind(method)
    found = posterior.calibration
    assert found.kind == kind
    assert len(found.scores) == (50 if kind == "combined" else 100)
    p = posterior.p_value(NEW)
    scores = posterior.ood_score(NEW)
    assert torch.equal(scores, posterior.ood_score(NEW, kind))
    for value, score in zip(p.tolist(), scores.tolist(), strict=True):
        above, nearly = (
            sum(s >= score - less for s in found.scores.tolist()) for less in (0.0, 1e-3 * (1 + abs(score)))
        )
        assert (1 + above) / (1 + len(found.scores)) <= value + 1e-12
        assert value - 1e-12 <= (1 + nearly) / (1 + len(found.scores))
    assert torch.equal(posterior.is_ood(NEW), p <= 0.05)


@each_method
def test_every_method_has_label_sets_or_says_why_not(method: Method) -> None:
    posterior = calibrated(method)
    if method.samples:
        assert posterior.predict_set(NEW).shape == (40, 3)
        return
    with pytest.raises(SettingsError, match="is a score and makes no predictions"):
        posterior.predict_set(NEW)


@each_method
def test_every_method_can_be_calibrated_by_the_combined_score(method: Method) -> None:
    posterior = calibrated(method, kind="combined")
    found = posterior.calibration
    own = own_score(method)
    last = () if own is None else (f"log {own}",)
    confidence = ("generalized_entropy", "energy") if method.samples else ()
    distances = ("neighbour in the table", "neighbour 1", "neighbour 10", "neighbour 50", "residual")
    assert found.statistics == (*confidence, *distances, *last)
    assert len(posterior.p_value(NEW).unique()) > 5


@some_methods
def test_a_file_and_a_copy_decide_alike(method: Method, tmp_path: Path) -> None:
    for how in ({}, {"kind": "combined"}):
        posterior = calibrated(method, **how)
        p, sets = posterior.p_value(NEW), posterior.predict_set(NEW) if method.samples else None
        posterior.save(tmp_path / "posterior.safetensors")
        loaded = nb.load(tmp_path / "posterior.safetensors", MLP.build())
        for other in (loaded, copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior)), copy.copy(posterior)):
            assert torch.equal(other.p_value(NEW), p)
            assert other.calibration.to_dict() == posterior.calibration.to_dict()
            assert str(other.calibration) == str(posterior.calibration)
            if sets is not None:
                assert torch.equal(other.predict_set(NEW), sets)
        assert json.loads(json.dumps(posterior.calibration.to_dict()))["kind"] == posterior.calibration.kind


@some_methods
def test_a_file_without_a_calibration_can_be_calibrated(method: Method, tmp_path: Path) -> None:
    posterior = method.fit()
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = nb.load(tmp_path / "posterior.safetensors", MLP.build())
    assert loaded.calibration is None
    with pytest.raises(NotFittedError, match="calibrate"):
        loaded.p_value(NEW)
    assert torch.equal(loaded.calibrate(*HELD).p_value(NEW), posterior.calibrate(*HELD).p_value(NEW))


def test_a_copy_has_a_calibration_of_its_own() -> None:
    posterior = calibrated(PROJECTED[0])
    other, before = copy.deepcopy(posterior), posterior.p_value(NEW)
    other.calibrate(*CLASSIFICATION.data(n=60, seed=8))
    assert torch.equal(posterior.p_value(NEW), before)
    assert len(other.calibration.scores) == 30


def test_a_score_that_a_method_does_not_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="kind must be one of local_ensemble, combined for LocalEnsemble"):
        next(m for m in BASELINES if m.name == "LocalEnsemble").fit().calibrate(*HELD, kind="energy")


# --- files that were altered ------------------------------------------------------------------------------------------


def header(**changes: Any) -> Any:
    return lambda tensors, found: found["calibration"].update(changes)


def inner(**changes: Any) -> Any:
    return lambda tensors, found: found["calibration"]["combine"].update(changes)


def tensor(name: str, value: Any) -> Any:
    return lambda tensors, found: tensors.update({f"calibration.{name}": value})


ALTERED: dict[str, Any] = {
    "no scores": lambda tensors, found: tensors.pop("calibration.scores"),
    "empty scores": tensor("scores", torch.zeros(0).double()),
    "scores of another type": tensor("scores", torch.zeros(9)),
    "scores that are a table": tensor("scores", torch.zeros(9, 2).double()),
    "scores that are NaN": tensor("scores", torch.full((9,), torch.nan).double()),
    "infinite scores": tensor("scores", torch.full((9,), torch.inf).double()),
    "errors that are NaN": tensor("errors", torch.full((9,), torch.nan).double()),
    "errors of another type": tensor("errors", torch.zeros(9)),
    "positions without a kind": tensor("position_scores", torch.zeros(9).double()),
    "a kind without positions": header(position_kind="energy"),
    "no kind": lambda tensors, found: found["calibration"].pop("kind"),
    "a kind that is no word": header(kind=3),
    "a field too many": header(extra=1),
    "a precision that is no number": header(prior_precision="10"),
    "samples that are a list": header(n_samples=[4]),
    "no weights": header(combine=None),
    "fewer weights": inner(weights=[1.0]),
    "negative weights": inner(weights=[-1.0, 0.5, 0.5, 0.5, 0.5]),
    "weights that are NaN": inner(weights=[float("nan")] * 5),
    "no spread": inner(scale=[0.0] * 5),
    "weights that are words": inner(weights=["much"] * 5),
    "a part too many": inner(extra=[1.0] * 5),
    "statistics that are numbers": header(statistics=[1, 2, 3, 4, 5]),
    "no header": lambda tensors, found: found.update(calibration=[]),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_calibration_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    calibrated(PROJECTED[0]).save(path)
    rewritten(path, ALTERED[name])
    with pytest.raises(FileError, match=r"altered|calibration"):
        nb.load(path, MLP.build())


@pytest.mark.cpu
def test_statistics_of_another_method_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    calibrated(PROJECTED[0]).save(path)
    rewritten(
        path,
        header(
            statistics=[
                "generalized_entropy",
                "energy",
                "neighbour in the table",
                "neighbour 1",
                "neighbour 10",
                "neighbour 50",
                "residual",
                "log scod",
            ]
        ),
    )
    with pytest.raises(NotFittedError, match="other statistics than ProjectedPosterior: calibrate it again"):
        nb.load(path, MLP.build()).p_value(NEW)
