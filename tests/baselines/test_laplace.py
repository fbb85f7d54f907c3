"""Every Laplace approximation against dense float64 formulas of the slow oracles."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.baselines import DiagonalLaplace, LastLayerLaplace, LinearizedLaplace
from nullbayes.errors import LikelihoodError, ModelError, NotFittedError, NullBayesWarning, SettingsError
from support.models import CLASSIFICATION, CUSTOM, MLP, MODELS, REGRESSION, TASKS, Model, Task
from support.slow_answers import flat_parameters, gauss_newton, jacobian

HESSIAN_TASKS = [task for task in TASKS if task is not CUSTOM]
CNN, BATCHNORM, TIED = MODELS["cnn"], MODELS["batchnorm"], MODELS["tied weights"]
ALPHA = 0.7

each_task = pytest.mark.parametrize("task", HESSIAN_TASKS, ids=lambda task: task.name)
each_model = pytest.mark.parametrize("case", [MLP, CNN, BATCHNORM, TIED], ids=lambda case: case.name)


def fit(kind: type, task: Task = CLASSIFICATION, case: Model = MLP, *, n: int = 6, **settings: Any) -> Any:
    chosen = {name: settings.pop(name) for name in ("n_samples", "memory_limit") if name in settings}
    chosen = {"n_samples": 5, "generator": torch.Generator().manual_seed(0), "progress": False, **chosen}
    posterior = kind(case.build(task.outputs), task.likelihood, **{"prior_precision": ALPHA, **settings})
    return posterior.fit([task.data(case, n)], **chosen)


def last_columns(matrix: Tensor, case: Model, outputs: int = 3) -> slice:
    """The columns of the last layer, which comes last in all of these networks."""
    layer = [m for m in case.build(outputs).modules() if isinstance(m, nn.Linear)][-1]
    return slice(matrix.shape[-1] - sum(p.numel() for p in layer.parameters()), None)


def dense(kind: type, task: Task, case: Model, n: int = 6) -> tuple[Tensor, Tensor]:
    """The curvature of a method, and the rows of new inputs over its columns."""
    model, (x, y) = case.build(task.outputs), task.data(case, n)
    new = case.inputs(4, torch.Generator().manual_seed(11))
    matrix, rows = gauss_newton(model, x, y, task), jacobian(model, new)
    if kind is DiagonalLaplace:
        return torch.diag(matrix.diagonal()), rows
    if kind is LastLayerLaplace:
        where = last_columns(matrix, case, task.outputs)
        return matrix[where, where], rows[..., where]
    return matrix, rows


def check(posterior: Any, kind: type, task: Task, case: Model, n: int = 6, tolerance: float = 1e-8) -> None:
    """Variances on new inputs are those of the dense inverse, at two precisions."""
    matrix, rows = dense(kind, task, case, n)
    new = case.inputs(4, torch.Generator().manual_seed(11))
    for alpha in (ALPHA, 11.0):
        posterior.prior_precision = alpha
        inverse = torch.linalg.inv(matrix + alpha * torch.eye(len(matrix), dtype=torch.float64))
        wanted = torch.einsum("nop,pq,noq->no", rows, inverse, rows)
        exact = posterior.functional_variance(new, exact=True)
        torch.testing.assert_close(exact, wanted, rtol=tolerance, atol=tolerance)


@each_task
@pytest.mark.parametrize("kind", [DiagonalLaplace, LastLayerLaplace, LinearizedLaplace])
def test_variances_match_the_dense_inverse(kind: type, task: Task) -> None:
    check(fit(kind, task), kind, task, MLP)


@each_model
@pytest.mark.parametrize("kind", [DiagonalLaplace, LastLayerLaplace, LinearizedLaplace])
def test_every_kind_of_network_has_a_curvature(kind: type, case: Model) -> None:
    check(fit(kind, case=case), kind, CLASSIFICATION, case)


@pytest.mark.parametrize(
    ("n", "limits", "form"),
    [
        (6, {}, "all parameters, factored"),
        (6, {"_SMALL": 0}, "all rows, factored"),
        (40, {"_SMALL": 0}, "all parameters, factored"),
        (40, {"_FACTORED": {"cpu": 0, "cuda": 0}, "_PRECONDITIONED": 8}, "conjugate gradients"),
    ],
)
def test_the_full_matrix_is_factored_where_it_fits(
    n: int, limits: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(f"nullbayes.baselines.laplace.{name}", value)
    posterior = fit(LinearizedLaplace, n=n)
    assert posterior.report.reason == form
    check(posterior, LinearizedLaplace, CLASSIFICATION, MLP, n, tolerance=1e-6)


def test_a_fit_that_is_interrupted_while_it_samples_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    posterior = fit(LinearizedLaplace)
    with monkeypatch.context() as patched:
        patched.setattr("nullbayes.linalg.curvature.Primal.sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            posterior.fit([CLASSIFICATION.data()], 5, progress=False)
    with pytest.raises(NotFittedError):
        posterior.predict(MLP.inputs(4, torch.Generator().manual_seed(11)))


@pytest.mark.cpu  # so few bytes are another matter elsewhere
def test_a_memory_limit_that_holds_no_samples_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"raise memory_limit, or use .*LastLayerLaplace"):
        fit(LinearizedLaplace, memory_limit="100KB")
    assert fit(LinearizedLaplace, memory_limit="1MB").report.reason == "all parameters, factored"


@pytest.mark.parametrize("kind", [DiagonalLaplace, LastLayerLaplace, LinearizedLaplace])
def test_samples_have_the_covariance_of_the_curvature(kind: type) -> None:
    """Of 20,000 samples; variances of the outputs spread by sqrt(2 / 20,000), one percent."""
    posterior = fit(kind, n_samples=20_000)
    new = MLP.inputs(4, torch.Generator().manual_seed(11))
    exact = posterior.functional_variance(new, exact=True)
    torch.testing.assert_close(posterior.functional_variance(new), exact, rtol=0.06, atol=0)
    own = MLP.build()(new).detach()
    assert ((posterior.predict(new).mean - own).abs() < 5 * (exact / 20_000).sqrt()).all()


def test_rows_of_float32_give_the_same_variances() -> None:
    x, y = CLASSIFICATION.data(MLP, 6)
    posterior = LinearizedLaplace(MLP.build().float(), prior_precision=ALPHA)
    posterior.fit([(x.float(), y)], 5, progress=False)
    new = MLP.inputs(4, torch.Generator().manual_seed(11))
    wanted = fit(LinearizedLaplace).functional_variance(new, exact=True)
    torch.testing.assert_close(
        posterior.functional_variance(new.float(), exact=True).double(), wanted, rtol=1e-4, atol=1e-5
    )


# --- the last layer ---------------------------------------------------------------------------------------------------


class CalledFirstMadeLast(nn.Module):
    """Its last linear layer by name is the first that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def test_the_last_layer_is_the_one_that_is_called_last() -> None:
    model = CalledFirstMadeLast().double()
    posterior = LastLayerLaplace(model)
    searched = posterior._network.module
    posterior.fit([CLASSIFICATION.data()], 3, progress=False)
    assert set(posterior.sample()) == {"head.weight", "head.bias"}
    assert not any(m._forward_hooks for m in (*model.modules(), *searched.modules()))
    chosen = LastLayerLaplace(model, parameters="body.*").fit([CLASSIFICATION.data()], 3, progress=False)
    assert set(chosen.sample()) == {"body.weight", "body.bias"}


class TwoHeads(nn.Module):
    """The layer that is called last is not the one that gives the outputs."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.main, self.aux, self.scale = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2), scale

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x).tanh()
        return {"logits": self.scale * self.main(features), "aux": self.aux(features)}


def test_the_last_layer_is_the_one_that_returns_the_outputs() -> None:
    posterior = LastLayerLaplace(TwoHeads().double()).fit([CLASSIFICATION.data()], 3, progress=False)
    assert set(posterior.sample()) == {"main.weight", "main.bias"}
    assert (posterior.functional_variance(CLASSIFICATION.data()[0], exact=True) > 0).all()


def test_a_last_layer_that_outputs_do_not_depend_on_is_refused() -> None:
    posterior = LastLayerLaplace(TwoHeads(scale=0.5).double())  # no layer returns the outputs
    with pytest.raises(ModelError, match=r'not depend on aux\.weight, aux\.bias.*parameters="head\.\*"'):
        posterior.fit([CLASSIFICATION.data()], 3, progress=False)
    named = LastLayerLaplace(TwoHeads(scale=0.5).double(), parameters="main.*")
    assert set(named.fit([CLASSIFICATION.data()], 3, progress=False).sample()) == {"main.weight", "main.bias"}


def test_a_network_without_a_linear_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, (6, 5)), nn.Flatten()).double()
    with pytest.raises(ModelError, match=r"parameters=\[\.\.\.\]"):
        LastLayerLaplace(model).fit([CLASSIFICATION.data(CNN)], progress=False)


# --- the prior precision ----------------------------------------------------------------------------------------------


@each_task
@pytest.mark.parametrize("kind", [DiagonalLaplace, LastLayerLaplace, LinearizedLaplace])
def test_the_marginal_likelihood_is_maximized(kind: type, task: Task) -> None:
    posterior = fit(kind, task, n=30)
    matrix, _ = dense(kind, task, MLP, 30)
    flat = flat_parameters(MLP.build(task.outputs))[-len(matrix) :]

    def evidence(alpha: float) -> float:
        prior = 0.5 * len(matrix) * math.log(alpha) - 0.5 * alpha * float(flat.square().sum())
        return prior - 0.5 * float(torch.logdet(matrix + alpha * torch.eye(len(matrix), dtype=torch.float64)))

    best = posterior.optimize_prior_precision([], "marglik")
    assert posterior.prior_precision == best
    assert all(evidence(best) > evidence(best * factor) for factor in (0.9, 1.1))


@pytest.mark.parametrize("kind", [DiagonalLaplace, LinearizedLaplace])
def test_held_out_likelihood_chooses_from_the_grid_of_the_paper(kind: type) -> None:
    posterior, x = fit(kind, n=30, n_samples=40), MLP.inputs(25, torch.Generator().manual_seed(7))
    x = 8 * x  # where the network is sure of itself
    held_out = x, (MLP.build()(x).argmax(1) + (torch.arange(25) % 4 == 0)) % 3  # three of four as the network says

    def score(alpha: float) -> float:
        posterior.prior_precision = alpha
        return nb.metrics.nll(posterior.predict(held_out[0]).probs, held_out[1])

    scores = {alpha: score(alpha) for alpha in (0.1, 1.0, 5.0, 10.0, 50.0, 100.0)}
    posterior.prior_precision = 3.0
    assert posterior.optimize_prior_precision([held_out], "grid") == min(scores, key=scores.get)
    assert posterior.optimize_prior_precision([held_out]) == posterior.prior_precision
    best = posterior.optimize_prior_precision([held_out], "nll")
    assert score(best) <= min(scores.values()) + 1e-6


@pytest.mark.filterwarnings("ignore:The held-out likelihood is still rising")
@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, DiagonalLaplace, LinearizedLaplace])
@pytest.mark.parametrize("how", ["nll", "grid"])
def test_a_precision_chosen_by_training_data_causes_a_warning(kind: type, how: str) -> None:
    posterior, data = fit(kind, n=30), CLASSIFICATION.data(MLP, 30)
    with pytest.warns(NullBayesWarning, match="30 of the 30 inputs are training data: precision and temperature that"):
        posterior.optimize_prior_precision(data, how)
    with pytest.warns(NullBayesWarning, match="30 of the 30 inputs are training data: a sentence"):
        posterior._evaluate([data], "a sentence")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*are training data")
        posterior.optimize_prior_precision((data[0] + 0.1, data[1]), how)
        posterior.check_fit(*data)  # which asks how well training data are predicted


@pytest.mark.filterwarnings("ignore:.*are training data")
def test_a_failed_search_leaves_the_precision_as_it_was() -> None:
    posterior = fit(DiagonalLaplace)
    x, _ = CLASSIFICATION.data()
    with pytest.raises(LikelihoodError):
        posterior.optimize_prior_precision([(x, torch.full((5,), 7))])
    with pytest.raises(SettingsError, match="one of nll, grid, marglik, closed_form"):
        posterior.optimize_prior_precision([], "guess")
    assert posterior.prior_precision == ALPHA


def test_a_regression_weighs_its_curvature_by_the_fitted_noise() -> None:
    model, (x, y) = MLP.build(2), REGRESSION.data(n=6)
    posterior = DiagonalLaplace(model, "regression", prior_precision=ALPHA).fit([(x, y)], 3, progress=False)
    variance = (model(x).detach() - y).square().mean(0)  # of each output
    wanted = (jacobian(model, x).square() / variance[:, None]).sum((0, 1))
    torch.testing.assert_close(posterior.curvature.diagonal, wanted)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_holds_the_samples_and_not_the_rows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nullbayes.baselines.laplace._SMALL", 0)
    model, new = MLP.build(), MLP.inputs(4, torch.Generator().manual_seed(11))
    posterior = LinearizedLaplace(model).fit([CLASSIFICATION.data()], 5, progress=False)
    assert posterior.report.reason == "all rows, factored"
    posterior.save(tmp_path / "p")
    loaded = nb.load(tmp_path / "p", copy.deepcopy(model))
    assert torch.equal(loaded.predict(new).samples, posterior.predict(new).samples)
    with pytest.raises(NotFittedError, match="Fit a new one"):
        loaded.prior_precision = 2.0
    assert loaded.prior_precision == 1.0
    assert torch.equal(loaded.predict(new).samples, posterior.predict(new).samples)


def test_a_seed_gives_the_same_noise_at_every_precision() -> None:
    """The diagonal and the network's own scale are all that turn the noise of a seed into samples."""
    one, other = fit(DiagonalLaplace), fit(DiagonalLaplace, prior_precision=1e12)
    noise = one._deviations() * (one.curvature.diagonal + ALPHA).sqrt()
    torch.testing.assert_close(other._deviations() * 1e6, noise, rtol=1e-6, atol=1e-6)
