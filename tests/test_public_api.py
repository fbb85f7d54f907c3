"""The public names and signatures, which do not change."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import nullbayes as nb
from nullbayes import errors
from support.models import CLASSIFICATION, MLP

NAMES = (
    "ProjectedPosterior", "LossProjectedPosterior", "load", "plan", "Plan", "OutputJacobian", "LossJacobian",
    "DenseRows", "MatrixFreeRows", "Rows", "Prediction", "FitReport", "FitCheck", "evaluation_loader",
    "evaluate", "Evaluation",
)  # fmt: skip
MODULES = ("baselines", "detectors", "projectors", "likelihoods", "metrics", "errors")
BASELINES = (
    "MAP", "DiagonalLaplace", "LastLayerLaplace", "KroneckerLaplace", "LinearizedLaplace", "LanczosLaplace",
    "LocalEnsemble", "SCOD", "SketchedLanczos", "SWAG", "DeepEnsemble", "TemperatureScaling",
)  # fmt: skip
DETECTORS = (
    "MSP", "MaxLogit", "Energy", "GEN", "KNN", "Mahalanobis", "RelativeMahalanobis", "ViM", "ReAct", "SCALE", "FDBD",
    "NNGuide", "GradPCA",
)  # fmt: skip
METHODS = {
    "fit": ["loader", "targets", "n_samples", "projector", "tolerance", "generator", "memory_limit", "progress"],
    "predict": ["x", "pred_type", "n_samples", "link_approx", "mask"],
    "functional_variance": ["x", "exact"],
    "ood_score": ["x", "kind", "per", "mask"],
    "optimize_prior_precision": ["loader", "method"],
    "check_fit": ["loader"],
    "sample": ["n"],
    "sampled_parameters": ["i"],
    "extend": ["n_samples"],
    "save": ["path"],
}


@pytest.mark.parametrize("name", NAMES)
def test_public_names_exist_and_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(nb, name))


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_exist(name: str) -> None:
    assert inspect.ismodule(getattr(nb, name))


def test_the_index_names_what_there_is() -> None:
    for name in ("ProjectedPosterior", "LossProjectedPosterior", "load", "OutputJacobian", "LossJacobian", "DenseRows",
                 "MatrixFreeRows", "projectors", "plan", "likelihoods", "metrics", "errors", "baselines", "evaluate",
                 "Evaluation", "detectors"):  # fmt: skip
        assert f"``{name}``" in nb.__doc__


def test_the_indices_name_every_metric() -> None:
    for name in nb.metrics.__all__:
        assert f"`{name}`" in nb.metrics.__doc__
        assert re.search(rf"\b{name}\b", nb.__doc__)
        assert inspect.getdoc(getattr(nb.metrics, name))


@pytest.mark.parametrize("name", ["ExactDual", "ExactPrimal", "Alternating", "Krylov", "Sketched", "Lanczos"])
def test_projectors_exist(name: str) -> None:
    assert issubclass(getattr(nb.projectors, name), nb.projectors.Projector)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_exist(name: str) -> None:
    assert issubclass(getattr(nb.baselines, name), nb.baselines.Baseline)
    assert inspect.getdoc(getattr(nb.baselines, name))


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_exist(name: str) -> None:
    assert issubclass(getattr(nb.detectors, name), nb.baselines.Baseline)
    assert inspect.getdoc(getattr(nb.detectors, name))


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_documented_arguments(kind: type, method: str) -> None:
    parameters = inspect.signature(getattr(kind, method)).parameters
    assert set(METHODS[method]) <= set(parameters)
    assert inspect.getdoc(getattr(kind, method))


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_posteriors_have_the_documented_constructor(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters)[:2] == ["model", "likelihood"]
    assert parameters["likelihood"].default == "classification"
    assert parameters["prior_precision"].default == "auto"
    for name in ("parameters", "prior_precision", "batch_fn"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_every_error_is_ours_and_a_built_in_one() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    for error in (c for c in classes if issubclass(c, Exception) and not issubclass(c, Warning)):
        assert issubclass(error, errors.NullBayesError)
        assert error is errors.NullBayesError or issubclass(error, (ValueError, RuntimeError))
        assert inspect.getdoc(error)
    for warning in (c for c in classes if issubclass(c, Warning)):
        assert issubclass(warning, errors.NullBayesWarning)
        assert issubclass(warning, UserWarning)


def test_the_basic_example_runs(tmp_path: object) -> None:
    x, y = CLASSIFICATION.data(n=8)
    model = MLP.build()
    posterior = nb.ProjectedPosterior(model, likelihood="classification")
    posterior.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3), n_samples=30)
    prediction = posterior.predict(x)
    assert prediction.mean.shape == prediction.variance.shape == prediction.probs.shape == (8, 3)
    assert prediction.samples.shape == (30, 8, 3)
    assert posterior.ood_score(x).shape == (8,)
    posterior.save(f"{tmp_path}/posterior.safetensors")
    assert nb.load(f"{tmp_path}/posterior.safetensors", model).n_samples == 30


def test_a_plan_says_what_a_fit_would_do() -> None:
    x, y = CLASSIFICATION.data(n=8)
    plan = nb.plan(MLP.build(), [(x, y)], n_samples=4, memory_limit="1GB")
    assert (plan.n_rows, plan.n_parameters, plan.n_samples, plan.memory_limit) == (24, 51, 4, 2**30)
    assert plan.storage == "device"
    assert 0 < plan.peak_bytes < 2**20
    assert plan.operations > 0
    assert "24 rows over 51 parameters" in str(plan)
    assert nb.plan(MLP.build(), [(x, y)], loss=True).n_rows == 8
    assert nb.plan(MLP.build(), [(x, y)], parameters="2.*").n_parameters == 21
